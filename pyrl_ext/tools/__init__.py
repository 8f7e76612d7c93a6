"""Commands besides training: doctor, export, prebuild, report."""
