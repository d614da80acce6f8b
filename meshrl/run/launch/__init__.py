"""Launch runs on several machines: the resources that a configuration needs, and how to request them.

`slurm_script` and `ray_job` write the files for SLURM and KubeRay. `SshCluster` starts Ray on hosts over ssh, runs
there, and stops it.
"""

from meshrl.run.launch.kuberay import Pods, files_beside, ray_job, yaml_text
from meshrl.run.launch.needs import Need, needs_of, nodes_for
from meshrl.run.launch.slurm import slurm_script, submit
from meshrl.run.launch.ssh import SSH, SshCluster

__all__ = [
    "SSH",
    "Need",
    "Pods",
    "SshCluster",
    "files_beside",
    "needs_of",
    "nodes_for",
    "ray_job",
    "slurm_script",
    "submit",
    "yaml_text",
]
