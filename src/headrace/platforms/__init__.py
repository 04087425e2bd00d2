"""What the machine is: capability queries only. Importing the package imports no torch and touches no device."""
