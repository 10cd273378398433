"""`moelib train`: trains a named config; the same command again resumes the run.

moelib train --module=M --config=C --trainer_dir=RUN --set=input.global_batch_size=512
"""

from moelib import launch

Flags = launch.TrainFlags
run = launch.train
