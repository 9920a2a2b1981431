"""Which secret, key file or certificates a worker of a group has. Needs Ray for its import only."""

from __future__ import annotations

from pathlib import Path

import pytest

from backhaul import rpc
from backhaul.ray.joining import own_options
from backhaul.security.keys import make_key_file
from mint import Mint


@pytest.mark.parametrize("kind", ["secret", "key_file", "tls"])
def test_a_worker_with_options_of_its_own_has_the_credentials_of_its_group(kind: str, tmp_path: Path) -> None:
    make_key_file(str(tmp_path / "cluster.key"))
    credentials = {
        "secret": bytes(32),
        "key_file": tmp_path / "cluster.key",
        "tls": Mint(tmp_path).tls("worker"),
    }
    of_group = rpc.RpcOptions(num_worker_threads=4, **{kind: credentials[kind]})
    options = own_options(rpc.RpcOptions(num_worker_threads=7), of_group)
    assert (options.secret, options.key_file, options.tls) == (of_group.secret, of_group.key_file, of_group.tls)
    assert options.num_worker_threads == 7
    own = rpc.RpcOptions(secret=bytes(range(32)))
    assert own_options(own, of_group) == own
