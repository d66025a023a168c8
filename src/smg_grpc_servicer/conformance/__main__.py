"""`python -m smg_grpc_servicer.conformance ADDRESS`: does this servicer keep its promises?

Exit code 0 when every check passed or did not apply, 1 when one failed, 2 when there was nothing
to check: bad usage, an address that does not answer, a server of none of the four protos.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from smg_grpc_servicer.conformance.connect import Connection, Unusable
from smg_grpc_servicer.conformance.registry import Check
from smg_grpc_servicer.conformance.report import Table, document
from smg_grpc_servicer.conformance.runner import Outcome, prepare, run
from smg_grpc_servicer.conformance.suite import UnknownCheck, select
from smg_grpc_servicer.testing.dialects import DIALECTS


def _ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        ids = []
    if not ids or not all(0 <= token < 2**31 for token in ids):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: token ids like 5,6,7")
    return ids


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a number above 0")
    return number


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a whole number above 0")
    return int(text)


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(
        prog="python -m smg_grpc_servicer.conformance",
        description="Checks a servicer from outside: what it promises, over its own port.",
        epilog="Exit code: 0 all passed, 1 a failure, 2 nothing to check.",
    )
    new.add_argument("address", nargs="?", metavar="ADDRESS", help="host:port of the servicer")
    new.add_argument(
        "--engine", choices=tuple(DIALECTS), help="its proto; asked of the server when not given"
    )
    new.add_argument(
        "--prompt-ids",
        type=_ids,
        default=[5, 6, 7],
        metavar="IDS",
        help="token ids that make a harmless prompt (default: 5,6,7)",
    )
    new.add_argument(
        "--vocab-size", type=_count, metavar="N", help="when GetModelInfo does not say"
    )
    new.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="checks, groups or patterns to run"
    )
    new.add_argument("--list", action="store_true", help="list the checks and end")
    new.add_argument("--json", metavar="FILE", help="write the results there; - for stdout")
    new.add_argument(
        "--timeout",
        type=_positive,
        default=20.0,
        metavar="S",
        help="seconds a check may take (default: 20)",
    )
    new.add_argument(
        "--tls-ca", type=Path, metavar="FILE", help="PEM certificates to trust; turns TLS on"
    )
    new.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="client certificate, for mutual TLS"
    )
    new.add_argument("--tls-key", type=Path, metavar="FILE", help="private key of --tls-cert")
    new.add_argument(
        "--token-file", type=Path, metavar="FILE", help="its first line is the bearer token"
    )
    new.add_argument(
        "--shutdown-pid",
        type=_count,
        metavar="PID",
        help="process to send SIGTERM at the end, for the shutdown checks",
    )
    return new


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code; argparse raises SystemExit with 2 on bad usage."""
    arguments = parser().parse_args(argv)
    try:
        checks = select(arguments.only)
        if arguments.list:
            Table(checks).listing(checks)
            return 0
        if arguments.address is None:
            raise Unusable("ADDRESS: the host:port of the servicer is required")
        connection = _connection(arguments)
        return asyncio.run(_main(arguments, connection, checks))
    except (UnknownCheck, Unusable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _connection(arguments: argparse.Namespace) -> Connection:
    host, colon, port = arguments.address.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise Unusable(f"ADDRESS: got {arguments.address!r}; allowed: host:port")
    token = None
    if arguments.token_file is not None:
        token = _token(arguments.token_file)
    ca = None if arguments.tls_ca is None else _read("--tls-ca", arguments.tls_ca)
    pair = None
    if arguments.tls_cert is not None or arguments.tls_key is not None:
        if ca is None or arguments.tls_cert is None or arguments.tls_key is None:
            raise Unusable("--tls-cert, --tls-key and --tls-ca belong together")
        pair = (_read("--tls-key", arguments.tls_key), _read("--tls-cert", arguments.tls_cert))
    return Connection(arguments.address, ca, token, pair)


def _token(path: Path) -> str:
    """The first one in the file."""
    lines = _read("--token-file", path).removeprefix(codecs.BOM_UTF8).splitlines()
    tokens = [line.strip() for line in lines if line.strip() and not line.strip().startswith(b"#")]
    if not tokens:
        raise Unusable(f"--token-file: got {str(path)!r}, which holds no token")
    text = tokens[0].decode("ascii", "replace")
    if not text.isascii() or not text.isprintable():
        raise Unusable(
            f"--token-file: got {str(path)!r}, whose token holds characters that no header can "
            "carry; allowed: printable ASCII"
        )
    return text


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Unusable(f"{flag}: cannot read {str(path)!r} ({error.strerror})") from None


async def _main(
    arguments: argparse.Namespace, connection: Connection, checks: Sequence[Check]
) -> int:
    target = await prepare(
        connection,
        engine=arguments.engine,
        prompt=arguments.prompt_ids,
        vocab_size=arguments.vocab_size,
        timeout=arguments.timeout,
        shutdown_pid=arguments.shutdown_pid,
    )
    # Whoever pipes the JSON on still sees the table.
    table = Table(checks, sys.stderr if arguments.json == "-" else sys.stdout)
    try:
        start = monotonic()
        table.header()
        results = await run(target, checks, table.row)
        seconds = monotonic() - start
    finally:
        await target.close()
    table.total(results, seconds)
    if arguments.json is not None:
        _write(arguments.json, json.dumps(document(target, results, seconds), indent=2) + "\n")
    return int(any(result.outcome is Outcome.FAIL for result in results))


def _write(where: str, text: str) -> None:
    if where == "-":
        sys.stdout.write(text)
        return
    try:
        Path(where).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Unusable(f"--json: cannot write {where!r} ({error.strerror})") from None


if __name__ == "__main__":
    sys.exit(main())
