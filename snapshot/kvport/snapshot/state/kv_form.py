"""How keys and values are kept, where that is not left to the model.

A form is part of the state identity: state of one form means nothing in another.
"""

from typing import Final, TypeAlias

import attrs

KEEP: Final = 4
"""First rows that a limited cache never drops, as in mlx-lm's `make_prompt_cache`."""


@attrs.frozen
class Quantisation:
    """Keys and values quantised from token 0 on.

    Attributes:
        bits: of a value.
        group_size: values that share a scale.
    """

    bits: int
    group_size: int

    @property
    def name(self) -> str:
        """As state identities have it."""
        return f"q{self.bits}g{self.group_size}"


@attrs.frozen
class Limit:
    """The first `KEEP` rows and the last ones, `rows` in all; others are forgotten."""

    rows: int = attrs.field(validator=attrs.validators.gt(KEEP))

    @property
    def name(self) -> str:
        """As state identities have it."""
        return f"r{self.rows}k{KEEP}"


KvForm: TypeAlias = Quantisation | Limit
