"""Scripts and command lines that people already have, read as far as every trainer has them alike: the shell, SLURM's
options, the launcher. Nothing in them is ever executed."""
