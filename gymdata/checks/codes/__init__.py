"""The validation codes, a file for each code or family: a class of ``gymdata.checks.violations.Check`` that is registered by
``CHECKS.register``. Other packages add one through an entry point of the group ``gymdata.checks``."""
