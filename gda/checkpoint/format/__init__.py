"""The files of a checkpoint: ``manifest`` (zarr v3 arrays), then ``manifest_json`` (its file)."""
