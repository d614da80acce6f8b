set -euo pipefail
cd @FOLDER@
export PATH=@PROGRAMS@:"$PATH"
# Nobody else may use the cluster of this job.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
# Two jobs that share a node have two ports.
PORT=$((20000 + SLURM_JOB_ID % 20000))
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# srun does not take over --cpus-per-task of sbatch since Slurm 22.05, and would give a step one core.
CORES=${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}
on() { srun --overlap $CORES --nodes="$1" --ntasks="$1" "${@:2}"; }
# On Debian the name of a host has the address 127.0.1.1 there, which no other node can reach.
IP=$(on 1 --nodelist="$HEAD" bash -c 'hostname --ip-address; hostname --all-ip-addresses; true' | tr ' ' '\n' |
  grep '\.' | grep --invert-match --max-count=1 '^127\.') || IP=127.0.0.1
if [ "$IP" = 127.0.0.1 ] && [ "$SLURM_NNODES" -gt 1 ]; then
  echo "error: $HEAD has no address that other nodes can reach" >&2
  exit 1
fi

trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT  # Ray ends with this script
on 1 --nodelist="$HEAD" ray start --head --block --node-ip-address="$IP" --port="$PORT" @RESOURCES@ &
if [ "$SLURM_NNODES" -gt 1 ]; then
  # They try until the head is there.
  on $((SLURM_NNODES - 1)) --exclude="$HEAD" ray start --block --address="$IP:$PORT" @RESOURCES@ &
fi
NODES="import ray; ray.init('$IP:$PORT', logging_level='ERROR'); print(sum(node['Alive'] for node in ray.nodes()))"
for _ in $(seq 60); do
  FOUND=$(on 1 --nodelist="$HEAD" python -c "$NODES" 2> /dev/null | tail -n 1) || FOUND=0
  [ "${FOUND:-0}" -ge "$SLURM_NNODES" ] && break
  sleep 5
done
if [ "${FOUND:-0}" -lt "$SLURM_NNODES" ]; then
  echo "error: ${FOUND:-0} of $SLURM_NNODES nodes have started Ray" >&2
  exit 1
fi
on 1 --nodelist="$HEAD" meshrl run @ARGUMENTS@ run.engine="$IP:$PORT"
