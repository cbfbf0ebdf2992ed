"""The steps in the folder of a run: ``rules`` on integers, then ``folder`` (the files)."""
