"""Settings: a flag, a variable and a default for each value, one rule for all of them.

The flag wins over the variable, the variable over the default, and each value remembers which
it was. Nothing is parsed until `resolve`, which checks everything and raises one `ConfigError`
that lists every fault, so a user fixes a command line once. The environment is read, never
written. A variable that is empty or blank counts as not set, and so does a port's that Kubernetes
set for a service (a warning tells).
"""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.parsers import Parser

log = logging.getLogger(__name__)

T = TypeVar("T")

HIDDEN = "***"

_SERVICE_LINK = re.compile(r"\s*(tcp|udp|sctp)://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """One knob. `name` is the attribute in the argparse namespace and the key of a value."""

    name: str
    parse: Parser[T]
    default: T
    help: str
    flag: str | None = None
    env: str | None = None
    old_envs: tuple[str, ...] = ()
    """Earlier names of the variable: still read, with a warning."""
    secret: bool = False
    """Its value is never shown."""
    required: bool = False

    def show(self, value: object) -> str:
        """The value as a user would write it."""
        if value is None:
            return "none"
        return HIDDEN if self.secret else self.parse.show(value)

    @property
    def where(self) -> str:
        """How to set it, for error texts."""
        return self.flag or self.env or self.name

    def explain(self) -> str:
        """The help line: what it is, what it is when not set, and its variable."""
        notes = []
        if self.required:
            notes.append("required")
        elif self.default is not None:
            # A default is public, also that of a secret.
            notes.append(f"default: {self.parse.show(self.default)}")
        if self.env:
            notes.append(f"env: {self.env}")
        return f"{self.help} ({'; '.join(notes)})" if notes else self.help


@dataclass(frozen=True, slots=True)
class Values(Mapping[str, object]):
    """Resolved values. `values[SETTING]` is typed; `values["name"]` works too."""

    _values: Mapping[str, object]
    sources: Mapping[str, str]
    """name → `flag`, `env SMG_…` or `default`."""
    _settings: Mapping[str, Setting[Any]] = field(repr=False)

    def get_value(self, setting: Setting[T]) -> T:
        """The value of a setting, with its type."""
        return cast("T", self._values[setting.name])

    def __getitem__(self, name: str) -> object:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def describe(self) -> dict[str, str]:
        """name → `value (source)`, fit for a log line: secrets are hidden."""
        return {
            name: f"{self._settings[name].show(value)} ({self.sources[name]})"
            for name, value in self._values.items()
        }

    def changed(self) -> dict[str, str]:
        """As `describe`, only what somebody set."""
        return {n: text for n, text in self.describe().items() if self.sources[n] != "default"}


class Settings:
    """The settings of one program. Holds no values: parsing twice gives the same twice."""

    def __init__(self, *settings: Setting[Any]) -> None:
        self._settings = {setting.name: setting for setting in settings}
        if len(self._settings) != len(settings):
            raise ValueError("two settings share a name")

    def __add__(self, other: Settings) -> Settings:
        return Settings(*self, *other)

    def __iter__(self) -> Iterator[Setting[Any]]:
        return iter(self._settings.values())

    def __len__(self) -> int:
        return len(self._settings)

    def add_to(
        self,
        parser: argparse.ArgumentParser | argparse._ArgumentGroup,
        *,
        prefix: str = "",
        default: str | None = None,
    ) -> None:
        """Add the flags. They keep raw text; `resolve` parses it.

        `prefix` keeps them apart from somebody else's in one namespace, `argparse.SUPPRESS` as
        `default` leaves those out of it that are not given.
        """
        for setting in self:
            if setting.flag is None:
                continue
            text = setting.explain().replace("%", "%%")
            if setting.parse.switch:
                parser.add_argument(
                    setting.flag,
                    dest=prefix + setting.name,
                    action=argparse.BooleanOptionalAction,
                    default=default,
                    help=text,
                )
            else:
                parser.add_argument(
                    setting.flag,
                    dest=prefix + setting.name,
                    nargs="+" if setting.parse.many else None,
                    default=default,
                    metavar=setting.parse.metavar,
                    help=text,
                )

    def resolve(
        self,
        given: argparse.Namespace | Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Values:
        """Values of all settings. `given` maps names to raw flag values; None means not given."""
        flags = vars(given) if isinstance(given, argparse.Namespace) else given or {}
        env = os.environ if environ is None else environ
        values: dict[str, object] = {}
        sources: dict[str, str] = {}
        faults: list[str] = []
        for setting in self:
            try:
                values[setting.name], sources[setting.name] = _pick(setting, flags, env)
            except ConfigError as error:
                faults.append(str(error))
        if faults:
            raise ConfigError("\n".join(faults))
        return Values(values, sources, dict(self._settings))


def _pick(
    setting: Setting[Any], flags: Mapping[str, object], environ: Mapping[str, str]
) -> tuple[object, str]:
    raw = flags.get(setting.name)
    if raw is not None:
        text = ",".join(map(str, raw)) if isinstance(raw, (list, tuple)) else str(raw)
        return _parse(setting, setting.where, text), "flag"
    for name in (setting.env, *setting.old_envs):
        if name is not None and environ.get(name, "").strip():
            if setting.parse.service_link and _SERVICE_LINK.match(environ[name]):
                log.warning(
                    "%s=%r is ignored: Kubernetes set it for a service of that name"
                    " (enableServiceLinks: false keeps such variables out); use %s",
                    name,
                    environ[name],
                    setting.flag or "another port variable",
                )
                continue
            value = _parse(setting, name, environ[name])
            if name in setting.old_envs:
                log.warning("%s is deprecated; set %s", name, setting.env or setting.flag)
            return value, f"env {name}"
    if setting.required:
        raise ConfigError(f"{setting.where}: not given; allowed: {setting.parse.allowed}")
    return setting.default, "default"


def _parse(setting: Setting[Any], where: str, text: str) -> object:
    try:
        return setting.parse(text)
    except (ValueError, OverflowError) as error:
        reason = str(error)
        # Some only repeat the value, and no reason may repeat a secret.
        repeats = ("invalid literal", "could not convert", repr(text))
        if setting.secret or reason.startswith(repeats):
            reason = ""
        got = HIDDEN if setting.secret else repr(text)
        detail = f" ({reason})" if reason else ""
        raise ConfigError(f"{where}: got {got}{detail}; allowed: {setting.parse.allowed}") from None
