"""Launchers: the processes of a training run on this machine or a cluster, as configs."""
