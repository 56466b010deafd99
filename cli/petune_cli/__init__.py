"""The command line. Every verb is thin: it finds what it was given, calls the library, and shows the
answer."""
