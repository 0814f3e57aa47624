"""Versions of the weights as deltas: what is written, what a reader gets, and what is removed."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from rloo import kernels
from rloo.engines.delta_values import update_values
from rloo.engines.vllm.server_plugin.rloo_weights import (
    VersionReader,
    WrongDigestError,
    apply_changes,
    digest_tensor,
)
from rloo.engines.weight_delta import DeltaWriter
from rloo.engines.weight_store import WeightStore
from rloo.model.export import PolicyExport
from support.vllm_engines import damage, make_policy


def nudge(policy, seed, rate=1e-6):
    """A step as small as one of Adam at this learning rate."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(rate * torch.randn_like(parameter).sign())


def exported(policy, folder, dtype=torch.bfloat16):
    """The tensors of a complete export."""
    folder.mkdir()
    PolicyExport(policy, dtype).write(folder)
    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}


def same(tensors, others) -> bool:
    return tensors.keys() == others.keys() and all(
        t.dtype == others[n].dtype and torch.equal(t, others[n]) for n, t in tensors.items()
    )


def sizes(store) -> dict[int, int]:
    return {
        v: sum(f.stat().st_size for f in store.path(v).glob("*.safetensors")) for v in store.all()
    }


@pytest.fixture
def made(tmp_path):
    policy = make_policy()
    store = WeightStore(tmp_path / "store")
    store.folder.mkdir()
    writer, source = DeltaWriter(store, torch.bfloat16), PolicyExport(policy, torch.bfloat16)
    return policy, store, writer, source


def test_a_delta_read_through_its_bases_is_the_complete_export(made, tmp_path):
    policy, store, writer, source = made
    for version in range(6):
        writer.write(version, source.write)
        reader = VersionReader(store.path(version))
        assert same(reader.read(), exported(policy, tmp_path / f"e{version}", source.dtype))
        assert reader.root == store.complete(version) == store.path(0)
        assert store.base(version) == (version - 1 if version else None)
        nudge(policy, version)
    found = sizes(store)
    assert max(found[v] for v in range(1, 6)) < 0.2 * found[0]
    assert 0 < writer.stats["engine/changed_share"] < 0.1
    assert not (store.path(3) / "config.json").exists() and (store.path(0) / "config.json").exists()


def test_the_newest_version_is_read_from_memory_until_there_is_another(made, tmp_path):
    policy, _, writer, source = made
    for version in range(2):
        nudge(policy, version)
        writer.write(version, source.write)
        found = dict(writer.tensors(version, torch.device("cpu")))
        assert same(found, exported(policy, tmp_path / f"e{version}"))
    described = dict(writer.tensors(1, torch.device("meta")))
    assert list(described) == list(found)
    for name, tensor in described.items():
        assert (tensor.shape, tensor.dtype) == (found[name].shape, found[name].dtype)
    reading = writer.tensors(1, torch.device("cpu"))
    name, first = next(reading)
    writer.write(2, source.write)  # in place
    assert torch.equal(first, found[name])
    with pytest.raises(ValueError, match="version 1 of the weights is no longer the newest"):
        next(reading)


def test_unchanged_weights_cost_nothing_and_large_steps_begin_a_new_chain(made, tmp_path):
    policy, store, writer, source = made
    for version, rate in enumerate((0, 0, 0.1, 0.1, 1e-6)):
        nudge(policy, version, rate)
        writer.write(version, source.write)
        fresh = exported(policy, tmp_path / f"e{version}", source.dtype)
        assert same(VersionReader(store.path(version)).read(), fresh)
    assert [store.base(v) for v in range(5)] == [None, 0, 1, None, 3]
    assert [path.name for path in store.path(1).iterdir()] == ["manifest.json"]


def test_a_chain_ends_after_five_deltas(made):
    """Each load reads the whole chain."""
    policy, store, writer, source = made
    for version in range(14):
        nudge(policy, version)
        writer.write(version, source.write)
    bases = [None, 0, 1, 2, 3, 4, None, 6, 7, 8, 9, 10, None, 12]
    assert [store.base(version) for version in range(14)] == bases


def test_frozen_float32_weights_are_left_out(made, tmp_path):
    policy, store, _, _ = made
    writer, source = DeltaWriter(store), PolicyExport(policy, torch.float32)
    trained = policy.parameters[1]
    for version in range(3):
        writer.write(version, source.write)
        fresh = exported(policy, tmp_path / f"e{version}", torch.float32)
        assert same(VersionReader(store.path(version)).read(), fresh)
        with torch.no_grad():
            trained.add_(1e-6)
    assert writer.stats["engine/sent_bytes"] == trained.nbytes


@pytest.fixture
def chosen():
    """Restores the choice between C and numpy."""
    before = kernels.in_use()
    yield
    kernels.use(before)


@pytest.mark.parametrize("in_c", [False, True])
@pytest.mark.parametrize("places", [[], [0], [6], [3, 65535, 65536], [65534, 131072, 262139]])
def test_changed_values_survive_their_way(places, in_c, chosen):
    if in_c and (why := kernels.unavailable_reason()):
        pytest.skip(why)
    kernels.use(in_c)
    before = torch.randn(262140 if places and places[-1] > 6 else 7).bfloat16()
    now, base = before.clone(), before.clone()
    now[places] = float("nan")
    found, changes, counts, digest = update_values(before, now)
    assert torch.equal(before.view(torch.int16), now.view(torch.int16))
    assert len(places) == found == len(changes) == counts.sum()
    assert digest == digest_tensor(now)
    apply_changes(base, changes, counts)
    assert torch.equal(base.view(torch.int16), now.view(torch.int16))


def test_c_and_numpy_find_the_same_and_say_where_there_are_too_many(chosen):
    if why := kernels.unavailable_reason():
        pytest.skip(why)
    before = torch.randn(300_001).bfloat16()
    for share in (1e-5, 0.01, 0.4, 0.9):
        now = torch.where(torch.rand(len(before)) < share, -before, before)
        found = []
        for in_c in (False, True):
            kernels.use(in_c)
            old = before.clone()
            count, changes, counts, digest = update_values(old, now)
            assert torch.equal(old, now)
            found.append((count, counts.tolist(), digest, changes.tolist()))
        assert found[0][:3] == found[1][:3]
        few = found[0][0] == len(found[0][3])
        assert few == (share < 0.9) and (found[0] == found[1] or not few)


@pytest.mark.parametrize("size", [1, 3, 4, 130, 131_072, 131_074, 262_147])
def test_c_rounds_as_torch_and_has_the_digest_of_numpy(size, chosen):
    if why := kernels.unavailable_reason():
        pytest.skip(why)
    kernels.use(True)
    now = torch.randn(size) * 10.0 ** torch.randint(-44, 38, (size,))
    now[: size // 2].view(torch.int32)[::2] &= -65536
    now[: size // 2].view(torch.int32)[::2] |= 0x8000  # halfway between two values
    now[0] = float("inf")
    old = torch.zeros(size).bfloat16()
    found, _, _, digest = update_values(old, now)
    assert torch.equal(old, now.bfloat16()) and digest == digest_tensor(old)
    assert found == int((old.view(torch.int16) != 0).sum())
    now[-1] = float("nan")
    update_values(old, now)
    assert old[-1].isnan() and torch.equal(old[:-1], now[:-1].bfloat16())


def test_a_digest_detects_a_flipped_bit_and_swapped_words():
    tensor = torch.randn(70_001).bfloat16()
    wanted = digest_tensor(tensor)
    for place in (0, 35_000, 70_000):
        for bit in (1, 1 << 14):
            other = tensor.clone()
            other.view(torch.int16)[place] ^= bit
            assert digest_tensor(other) != wanted
    halves = tensor[:65536].view(2, -1)
    assert digest_tensor(halves.flip(0)) != digest_tensor(halves)
    assert digest_tensor(tensor[:-1]) != digest_tensor(tensor[:-2])


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_damage_anywhere_in_the_chain_is_refused_and_repaired(made, tmp_path, damaged):
    policy, store, writer, source = made
    for version in range(3):
        writer.write(version, source.write)
        nudge(policy, version)
    wanted = VersionReader(store.path(2)).read()
    wanted = {name: tensor.clone() for name, tensor in wanted.items()}
    damage(store.path(damaged))
    with pytest.raises(WrongDigestError, match="have the digest"):
        VersionReader(store.path(2)).read()
    version, folder = writer.write_complete()
    assert version == 2 and writer.write_complete() == (2, folder)
    assert same(VersionReader(folder).read(), wanted)
    assert (folder / "config.json").exists()
    writer.write(3, source.write)  # the chain is not trusted any more
    assert store.base(3) is None
    store.drop_older(3)
    assert [path.name for path in store.folder.iterdir()] == ["v00000003"]


def test_a_delta_that_cannot_be_read_is_refused_like_a_wrong_digest(made):
    policy, store, writer, source = made
    for version in range(2):
        writer.write(version, source.write)
        nudge(policy, version)
    file = sorted(store.path(1).glob("*.safetensors"))[0]
    before = file.read_bytes()
    damage(store.path(1), counts=True)
    with pytest.raises(WrongDigestError, match="a delta of the weights is damaged"):
        VersionReader(store.path(1)).read()
    file.write_bytes(before[: len(before) // 2])
    with pytest.raises(WrongDigestError, match=f"{file.name} is damaged"):
        VersionReader(store.path(1)).read()
    file.write_bytes(before)
    VersionReader(store.path(1)).read()


def test_a_base_stays_as_long_as_its_deltas_and_a_delta_without_it_is_not_read(made):
    policy, store, writer, source = made
    for version in range(4):
        writer.write(version, source.write)
        nudge(policy, version)
    store.keep({2})
    assert store.all() == [0, 1, 2]
    VersionReader(store.path(2)).read()
    shutil.rmtree(store.path(1))
    with pytest.raises(FileNotFoundError):
        VersionReader(store.path(2))
    store.keep({2})  # what is broken is removed, too


def test_another_folder_in_the_place_of_a_base_is_refused(made):
    policy, store, writer, source = made
    for version in range(3):
        writer.write(version, source.write)
        nudge(policy, version)
    manifest = store.path(1) / "manifest.json"
    body = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(body | {"digest": "0" * 16}))
    with pytest.raises(WrongDigestError, match="v00000001 is not the base of version 2"):
        VersionReader(store.path(2))


def test_a_failed_export_is_followed_by_a_complete_version(made):
    _, store, writer, source = made
    writer.write(0, source.write)

    def fail(folder, sink):
        sink.save({})
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        writer.write(1, fail)
    with pytest.raises(ValueError, match="was not written completely"):
        writer.write_complete()
    writer.write(1, source.write)
    assert store.base(1) is None and store.all() == [0, 1]
