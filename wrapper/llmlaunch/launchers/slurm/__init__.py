"""SLURM as a launcher: `launcher.SlurmLauncher` is what others take from this room."""
