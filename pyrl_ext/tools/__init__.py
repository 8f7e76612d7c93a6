"""Commands besides training: doctor, export, report."""
