"""Launch runs on several machines: the resources that a configuration needs, and how to request them.

`slurm_script` and `ray_job` write the files for SLURM and KubeRay. `SshCluster` starts Ray on hosts over ssh, runs
there, and stops it.
"""

from meshrl.run.launch.kuberay import (
    Pods as Pods,
    files_beside as files_beside,
    ray_job as ray_job,
    yaml_text as yaml_text,
)
from meshrl.run.launch.needs import Need as Need, needs_of as needs_of, nodes_for as nodes_for
from meshrl.run.launch.slurm import slurm_script as slurm_script, submit as submit
from meshrl.run.launch.ssh import SSH as SSH, SshCluster as SshCluster
