"""Reads the flags of `headrace plan` that say what load is planned for, and refuses what does not fit together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.cli.exits import UsageRefused

if TYPE_CHECKING:
    from headrace.policy.placement.model import ModelShape
    from headrace.policy.placement.need import Traffic

DEFAULT_CONTEXT = 4096

DEFAULT_USER_TOKENS_PER_S = 20.0

SECONDS_PER_DAY = 86_400

LIMITS = {
    "--tokens-per-user": (1e-3, 1e6),
    "--requests-per-second": (1e-6, 1e9),
    "--requests-per-day": (0.1, 1e14),
    "--peak": (1.0, 1000.0),
}
"""Flag -> (least, most) allowed values: outside them a figure would overflow, and no plan is like that."""


@dataclass(slots=True)
class AskedTraffic:
    """The flags' values; None: not given. notes: assumptions that `traffic` made"""

    context: int | None
    input_len: int | None
    output_len: int | None
    users: int | None
    tokens_per_user: float | None
    requests_per_second: float | None
    requests_per_day: float | None
    peak: float
    notes: list[str] = field(default_factory=list)

    def traffic(self, shape: ModelShape) -> Traffic:
        """Raises UsageRefused naming the flag."""
        from headrace.policy.placement.need import Traffic

        self._check()
        mean = self.requests_per_day / SECONDS_PER_DAY if self.requests_per_day is not None else self.requests_per_second
        if shape.is_encoder:
            if self.users is not None or self.tokens_per_user is not None or self.output_len is not None:
                raise UsageRefused(f"--users: {shape.name} generates nothing. Give --requests-per-second, inputs that are read.")
            length = self.input_len or self._context(shape)
            rate = (mean or 0.0) * length
            return Traffic(
                prompt_tokens=length,
                output_tokens=0,
                tokens_per_s=rate * self.peak,
                mean_tokens_per_s=rate if self.peak > 1 else 0.0,
                counts_prompts=True,
            )
        if self.users is not None and self.tokens_per_user is None:
            self.tokens_per_user = DEFAULT_USER_TOKENS_PER_S
            self.notes.append(f"No --tokens-per-user: {self.tokens_per_user:g} per second, faster than people read, are assumed.")
        of_users = self.users * self.tokens_per_user if self.users is not None and self.tokens_per_user is not None else 0.0
        prompt, output = self._lengths(shape, of_users, mean)
        rate = of_users or (mean or 0.0) * output
        return Traffic(
            prompt_tokens=prompt,
            output_tokens=output,
            tokens_per_s=rate * self.peak,
            mean_tokens_per_s=rate if self.peak > 1 else 0.0,
            user_tokens_per_s=self.tokens_per_user or 0.0,
            counts_prompts=mean is not None,
        )

    def _check(self) -> None:
        values = (self.tokens_per_user, self.requests_per_second, self.requests_per_day, self.peak)
        for (flag, (low, high)), value in zip(LIMITS.items(), values, strict=True):
            if value is not None and not low <= value <= high:
                raise UsageRefused(f"{flag}: expected a number from {low:g} to {high:g}, got {value:g}.")
        if self.requests_per_second is not None and self.requests_per_day is not None:
            raise UsageRefused("--requests-per-day: give it or --requests-per-second, not both.")
        has_rate = self.requests_per_second is not None or self.requests_per_day is not None
        if self.tokens_per_user is not None and self.users is None and not has_rate:
            raise UsageRefused("--tokens-per-user needs --users: how many users there are.")
        if self.peak != 1 and not has_rate and self.users is None:
            raise UsageRefused("--peak needs a load: --requests-per-day, --requests-per-second or --users.")
        if self.input_len is not None and self.output_len is not None and self.context is not None:
            raise UsageRefused("--context: it is --input-len and --output-len together; leave it out.")

    def _context(self, shape: ModelShape) -> int:
        if self.context is not None:
            return self.context
        length = min(DEFAULT_CONTEXT, shape.max_positions)
        self.notes.append(f"No --context: {length} tokens of prompt and answer are assumed.")
        return length

    def _lengths(self, shape: ModelShape, of_users: float, mean: float | None) -> tuple[int, int]:
        """Tokens of a prompt and of an answer."""
        from headrace.lab.plan.plan import OUTPUT_SHARE

        if of_users and mean is not None:
            return self._lengths_of_users(shape, of_users, mean)
        if self.input_len is not None and self.output_len is not None:
            return self.input_len, self.output_len
        length = self._context(shape)
        if (one := self.input_len or self.output_len) is not None:
            if one >= length:
                flag = "--input-len" if self.input_len is not None else "--output-len"
                raise UsageRefused(f"{flag}: {one} must be less than the context's {length}. Give --context, or both lengths.")
            return (one, length - one) if self.input_len is not None else (length - one, one)
        output = length // OUTPUT_SHARE
        if mean is not None:
            self.notes.append(f"Answers of {output} tokens, a quarter of the context, are assumed: --output-len would say.")
        return length - output, output

    def _lengths_of_users(self, shape: ModelShape, of_users: float, mean: float) -> tuple[int, int]:
        """The answers' length follows from the users, their speed and the rate of requests."""
        if self.output_len is not None:
            raise UsageRefused("--output-len: it follows from --users, --tokens-per-user and --requests-per-second; leave one of them out.")
        length, output = self._context(shape), round(of_users / mean)
        if self.input_len is not None and self.context is None:
            length = self.input_len + output
        if not 1 <= output < length:
            each = f"{of_users:,.0f} tokens/s in all are {of_users / mean:,.1f} tokens for each request"
            raise UsageRefused(f"--requests-per-second: {each}; an answer must have at least 1 and fewer than the context's {length}.")
        return length - output, output
