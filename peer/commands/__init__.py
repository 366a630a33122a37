"""The command line, the console, tables and views."""
