"""The parts of scripts/fuzz_readers.py: mutations, cases, and running one in a child process."""
