"""Launch runs on several machines: the resources that a configuration needs, and how to request them.

`slurm_script` and `ray_job` write the files for SLURM and KubeRay. `SshCluster` starts Ray on hosts over ssh, runs
there, and stops it.
"""

from meshrl.launch.kuberay import Pods, files_beside, ray_job
from meshrl.launch.needs import Need, needs_of, nodes_for
from meshrl.launch.slurm import SlurmOptions, slurm_script, submit
from meshrl.launch.ssh import SSH, SshCluster
from meshrl.launch.yaml_text import yaml_text

__all__ = [
    "SSH",
    "Need",
    "Pods",
    "SlurmOptions",
    "SshCluster",
    "files_beside",
    "needs_of",
    "nodes_for",
    "ray_job",
    "slurm_script",
    "submit",
    "yaml_text",
]
