"""The measurements behind `redrafter bench` and `redrafter tune`."""

__all__: list[str] = []
