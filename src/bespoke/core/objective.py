"""What a model is asked for, by name."""

from typing import Any

OBJECTIVES: dict[str, Any] = {}
