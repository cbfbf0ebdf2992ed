"""The steps on the hosts' own disks: written often, sent to one other host, read after a loss."""
