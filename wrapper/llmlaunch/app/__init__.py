"""What the command line and the public Python interface share: plan, render, submit, list. Prints nothing."""
