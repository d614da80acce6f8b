# The command ends when the connection ends, and with it standard input: nothing is left on the host.
cd @FOLDER@ || exit 91
read -r RAY_AUTH_TOKEN
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1
exec 3<&0
@COMMAND@ 3<&- < /dev/null &
child=$!
{ cat <&3; kill -TERM $child; } > /dev/null 2>&1 &
wait $child
status=$?
kill $! 2> /dev/null
exit $status
