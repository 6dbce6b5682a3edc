"""Text with known values, to which later versions may add."""

from __future__ import annotations

import enum


class OpenEnum(str, enum.Enum):
    """Text with known values; others are kept as they came."""

    @classmethod
    def _missing_(cls, value: object) -> OpenEnum:
        text = str(value)
        member = str.__new__(cls, text)
        member._name_ = text.upper()
        member._value_ = text
        return member

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) if isinstance(other, str) else NotImplemented

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __str__(self) -> str:
        return str.__str__(self.value)
