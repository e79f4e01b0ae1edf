"""The measurements behind `redrafter bench` and `redrafter tune`."""
