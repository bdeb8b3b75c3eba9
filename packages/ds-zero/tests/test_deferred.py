"""A model built in sharded_init has the values of a plain construction, and none of its memory before."""

import copy
import gc
import math
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_zero.deferred import DeferredInitError, forget, is_deferred, materialize, sharded_init
from ds_zero.recording import history_of
from ds_zero.testing import OddModel


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.out.scaled = True
        self.register_buffer("mask", torch.tril(torch.ones(6, 6)).view(1, 1, 6, 6), persistent=False)


class Gpt(nn.Module):
    """Custom initialisation through apply, scaled residual projections, tied head, a registered mask."""

    def __init__(self, width=12, depth=2):
        super().__init__()
        self.depth = depth
        self.embed = nn.Embedding(11, width)
        self.positions = nn.Parameter(torch.zeros(1, 6, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 11, bias=False)
        self.apply(self._init)
        self.head.weight = self.embed.weight

    def _init(self, module):
        if isinstance(module, nn.Linear):
            std = 0.02 / math.sqrt(2 * self.depth) if getattr(module, "scaled", False) else 0.02
            nn.init.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


class Pretrained(nn.Module):
    """As model libraries write it: data edits, padding row, rotary tables, default dtype set for the time."""

    def __init__(self):
        super().__init__()
        torch.set_default_dtype(torch.bfloat16)
        try:
            self.embed = nn.Embedding(11, 8, padding_idx=3)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.gate = nn.Parameter(torch.randn(5, 7))
            self.third = nn.Parameter(torch.ones(3) * (torch.ones(3, dtype=torch.int64) / 3))
        finally:
            torch.set_default_dtype(torch.float32)
        self.apply(self._init)
        inverse = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("inverse", inverse, persistent=False)
        self.register_buffer("cosines", torch.outer(torch.arange(6).float(), inverse).cos())
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]  # as vision models do
        self.rate = nn.Parameter(torch.full((2,), rates[-1]))

    def _init(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.weight.data[module.padding_idx].zero_()


def module_of(fill):
    """A module class whose construction is ``fill(module)``; a name for the test's label."""

    def construct():
        module = nn.Module()
        fill(module)
        return module

    construct.__name__ = fill.__name__
    return construct


def copied_from_random(m):
    m.weight = nn.Parameter(torch.empty(5, 7))
    m.scale = nn.Parameter(torch.ones(7) * 3)
    with torch.no_grad():
        m.weight.copy_(torch.randn(5, 7))
        m.weight[2, 1:4].fill_(9.0)
        m.weight.data.mul_(0.5)
        m.weight.add_(torch.tensor([1.0, 2, 3, 4, 5, 6, 7]))
        m.weight[torch.tensor([True, False, True, False, True])] = 0
        m.weight[torch.tensor([1, 3])] += 2


def torch_initialisers(m):
    for name, shape in {"wide": (5, 9), "tall": (40, 3), "cube": (4, 4, 3)}.items():
        m.register_parameter(name, nn.Parameter(torch.empty(shape)))
        nn.init.orthogonal_(m.get_parameter(name), gain=2.0)
    m.usual, m.tight, m.far = (nn.Linear(30, 20) for _ in range(3))
    nn.init.trunc_normal_(m.usual.weight, std=0.02)
    nn.init.trunc_normal_(m.tight.weight, std=1.0, a=-1.0, b=1.0)
    nn.init.trunc_normal_(m.far.weight, std=1.0, a=1.5, b=4.0)
    m.sparse, m.conv = nn.Linear(20, 9), nn.Conv1d(4, 4, 3)
    nn.init.sparse_(m.sparse.weight, 0.3)
    nn.init.dirac_(m.conv.weight)
    nn.init.eye_(m.sparse.weight[:9, :9])
    nn.init.kaiming_normal_(m.conv.bias.view(2, 2))


def torch_modules(m):
    m.rnn, m.gru, m.attention = nn.LSTM(5, 6, 2), nn.GRU(3, 4), nn.MultiheadAttention(8, 2)
    m.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    m.conv, m.norm, m.group = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
    m.half = nn.Linear(4, 4).to(torch.bfloat16).to("cpu").float()


def reparametrized(m):
    m.weight_norm = parametrizations.weight_norm(nn.Linear(4, 5))
    m.spectral_norm = parametrizations.spectral_norm(nn.Linear(4, 5))
    m.orthogonal = parametrizations.orthogonal(nn.Linear(4, 4))


def clones(m):
    layer = nn.Linear(4, 4)
    m.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))
    m.tied = m.layers[1]


def pieces_of_one_storage(m):
    m.weight = nn.Parameter(torch.empty(12, 4))
    for piece in m.weight.data.chunk(3):
        nn.init.orthogonal_(piece)
    for index, row in enumerate(m.weight.data.unbind(0)):
        row.mul_(index)
    m.zeros = nn.Parameter(torch.zeros(8, 4))
    with torch.no_grad():
        m.zeros[2:4].normal_()
        m.zeros[:, 1].uniform_()
    m.transposed = nn.Parameter(torch.empty(5, 7).t())
    nn.init.normal_(m.transposed)


def other_generators(m):
    generator = torch.Generator().manual_seed(3)
    m.first = nn.Parameter(torch.empty(5))
    nn.init.normal_(m.first, generator=generator)
    m.second = nn.Parameter(torch.randn(5, generator=generator))


def draws_that_depend_on_values(m):
    m.coin = nn.Parameter(torch.bernoulli(torch.full((40,), 0.3)))
    m.choice = nn.Parameter(torch.multinomial(torch.ones(50), 10).float())
    m.dropped = nn.Parameter(F.dropout(torch.ones(40), 0.5))
    m.after = nn.Parameter(torch.randn(3))


def real_tensors_that_change_later(m):
    table = torch.arange(5.0)
    large = torch.arange(30_000.0)
    m.small, m.large = nn.Parameter(torch.empty(5)), nn.Parameter(torch.empty(30_000))
    with torch.no_grad():
        m.small.copy_(table)
        m.large.copy_(large)
    table.zero_()
    large.view(2, -1)[0].zero_()


def real_tensors_that_take_deferred_values(m):
    m.weight = nn.Parameter(torch.rand(4))
    table = torch.arange(4.0)
    table.mul_(m.weight.detach())
    m.register_buffer("table", table)


def data_put_in_place(m):
    m.weight, m.table = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3))
    m.weight.data = torch.randn(3) + 1
    m.table.data = torch.tensor([1.0, 2, 3])
    m.old_style = nn.Parameter(torch.Tensor(3))
    m.old_style.data = torch.randn(3)


def many_at_once(m):
    m.first, m.second = nn.Linear(4, 4), nn.Linear(4, 4)
    with torch.no_grad():
        torch._foreach_mul_([m.first.weight, m.second.weight], 2.0)


def linear_algebra(m):
    m.exponential = nn.Parameter(torch.matrix_exp(torch.randn(4, 4)))
    m.basis = nn.Parameter(torch.linalg.svd(torch.randn(4, 3))[0])
    m.counts = nn.Parameter(torch.histc(torch.randn(9), 4))
    phases = torch.polar(torch.ones(3), torch.arange(3.0))
    m.register_buffer("phases", phases)
    m.register_buffer("conjugate", phases.conj() * 2)


def geometry_in_place(m):
    grown, filled = torch.empty(0), torch.empty(4)
    m.grown = nn.Parameter(grown.resize_(4, 5).normal_())
    torch.randn(4, out=filled)
    m.filled = nn.Parameter(filled.unsqueeze_(0))


def masks(m):
    upper = torch.ones(4, 4, dtype=torch.bool).triu(1)
    m.register_buffer("causal", torch.zeros(4, 4).masked_fill(upper, float("-inf")))
    m.register_buffer("banned", torch.triu(torch.full((4, 4), float("-inf")), diagonal=1))
    m.register_buffer("eye", torch.eye(3))


FILLS = [
    copied_from_random,
    torch_initialisers,
    torch_modules,
    reparametrized,
    clones,
    pieces_of_one_storage,
    other_generators,
    draws_that_depend_on_values,
    real_tensors_that_change_later,
    real_tensors_that_take_deferred_values,
    data_put_in_place,
    many_at_once,
    linear_algebra,
    geometry_in_place,
    masks,
]
BUILDERS = [OddModel, Gpt, Pretrained, *map(module_of, FILLS)]


def tensors_of(model):
    """Everything a model holds, buffers that are not saved among it."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def check_same_values(build):
    """Build plainly and deferred from one seed; every tensor, made alone, is equal bit for bit."""
    torch.manual_seed(0)
    plain = build()
    after_plain = torch.get_rng_state()
    torch.manual_seed(0)
    with sharded_init():
        deferred = build()
    assert torch.equal(torch.get_rng_state(), after_plain)
    torch.manual_seed(77)
    before = torch.get_rng_state()
    made = tensors_of(deferred)
    for name, expected in tensors_of(plain).items():
        (value,) = materialize([made[name]])
        assert torch.equal(value, expected), name
        assert (value.dtype, value.stride()) == (expected.dtype, expected.stride()), name
    for value, expected in zip(materialize(list(made.values())), tensors_of(plain).values(), strict=True):
        assert torch.equal(value, expected)
    assert torch.equal(torch.get_rng_state(), before)
    return deferred


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_values_are_those_of_a_plain_construction(build):
    check_same_values(build)


@pytest.mark.parametrize("build", [OddModel, Gpt, Pretrained], ids=lambda build: build.__name__)
def test_every_parameter_is_deferred(build):
    with sharded_init():
        model = build()
    assert all(is_deferred(parameter) for parameter in model.parameters())


IN_PLACE = {
    "normal": lambda target, source, other: target.normal_(std=other + 1),
    "copy": lambda target, source, other: target.copy_(source.clone()),
    "add": lambda target, source, other: target.add_(source, alpha=0.5),
    "rows": lambda target, source, other: target[other].uniform_(),
    "zero": lambda target, source, other: target.zero_(),
    "part": lambda target, source, other: target[1:3, other:].mul_(source[0, 0]),
    "constant": lambda target, source, other: target.copy_(torch.arange(16.0).view(4, 4) * other),
}
REPLACING = {
    "clone": lambda target, source: source.clone(),
    "transpose": lambda target, source: source.t(),
    "stack": lambda target, source: torch.cat([target[:2], source[2:]]),
}
STEPS = st.tuples(st.sampled_from([*IN_PLACE, *REPLACING]), st.integers(0, 3), st.integers(0, 3))


def run_program(steps):
    """Interpret ``steps`` on four square tensors, some of which come to share storage."""
    pool = [torch.zeros(4, 4), torch.rand(4, 4), torch.ones(4, 4), torch.empty(4, 4).normal_()]
    for action, at, other in steps:
        if action in REPLACING:
            pool[at] = REPLACING[action](pool[at], pool[other])
        else:
            IN_PLACE[action](pool[at], pool[other], other)
    return pool


@given(st.lists(STEPS, max_size=25), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_any_program_of_views_and_changes_gives_the_same_values(steps, wanted):
    torch.manual_seed(1)
    expected = run_program(steps)
    torch.manual_seed(1)
    with sharded_init():
        deferred = run_program(steps)
    assert torch.equal(materialize([deferred[wanted]])[0], expected[wanted])
    assert all(map(torch.equal, materialize(deferred), expected))


class RealBytes(TorchDispatchMode):
    """Counts the bytes of living real storages that operations returned."""

    def __init__(self):
        super().__init__()
        self.living = weakref.WeakKeyDictionary()
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self.living[leaf.untyped_storage()] = leaf.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self.living.values()))
        return outputs


def test_construction_holds_at_most_one_tensor_and_a_layer_is_made_alone():
    layer_bytes = (64 * 64 + 64) * 4
    with RealBytes() as building, sharded_init():
        model = nn.ModuleList(nn.Linear(64, 64) for _ in range(10))
        for layer in model:
            nn.init.normal_(layer.weight)
    assert building.peak <= layer_bytes
    with RealBytes() as making:
        values = materialize(list(model[7].parameters()))
    assert making.peak == sum(value.nbytes for value in values) == layer_bytes


def test_replay_lets_go_of_what_it_no_longer_needs():
    with sharded_init():
        weight = torch.rand(1000)
        for _ in range(20):
            weight = torch.randn(1000) + weight * 2
    with RealBytes() as making:
        materialize([weight])
    assert making.peak <= 4 * weight.nbytes


def test_what_a_fill_replaces_is_not_replayed():
    with sharded_init():
        linear = nn.Linear(8, 8)
        nn.init.normal_(linear.weight)
    calls = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Names():
        materialize([linear.weight])
    assert "aten::normal_" in calls
    assert "aten::uniform_" not in calls


def test_records_go_with_the_tensors():
    with sharded_init():
        model = Gpt()
        kept = torch.ones(3) * torch.rand(3)
    histories = [weakref.ref(history_of(parameter)) for parameter in model.parameters()]
    assert all(history() is not None for history in histories)
    del model
    gc.collect()
    assert [history() for history in histories] == [None] * len(histories)
    assert is_deferred(kept)


def test_forgotten_tensors_are_deferred_no_more_but_others_still_know_them():
    with sharded_init():
        first = torch.rand(3)
        second = first + 1
    (expected,) = materialize([first])
    forget([first, torch.ones(1)])
    assert not is_deferred(first)
    with pytest.raises(DeferredInitError, match="no recorded values"):
        materialize([first])
    assert torch.equal(materialize([second])[0], expected + 1)


def test_tensors_that_share_storage_share_it_when_made():
    with sharded_init():
        whole = torch.rand(4, 4)
        model = Gpt()
    part, row = materialize([whole[1:], whole[2]])
    part[1].zero_()
    assert row.eq(0).all()
    embed, head = materialize([model.embed.weight, model.head.weight])
    assert embed.data_ptr() == head.data_ptr()


def test_replay_leaves_the_callers_generator_alone():
    generator = torch.Generator().manual_seed(1)
    with sharded_init():
        weight = torch.randn(4, generator=generator)
    before = generator.get_state()
    materialize([weight])
    assert torch.equal(generator.get_state(), before)


def test_a_second_context_may_use_what_the_first_one_made():
    def build(context):
        torch.manual_seed(0)
        with context():
            first = nn.Linear(3, 3)
        with context(), context():  # a context inside another adds nothing
            second = nn.Linear(3, 3)
            with torch.no_grad():
                first.weight.add_(second.weight)
                second.bias.copy_(first.bias)
        return [*first.parameters(), *second.parameters()]

    assert all(map(torch.equal, materialize(build(sharded_init)), build(torch.enable_grad)))


def test_values_can_be_made_inside_the_context():
    with sharded_init():
        weight = torch.rand(3)
        (value,) = materialize([weight])
        assert not value.is_meta
        assert value.ge(0).all()
    assert torch.equal(materialize([weight], device=torch.device("cpu"))[0], value)


def test_torch_is_as_before_after_the_context_even_if_it_fails():
    functions = dict(vars(nn.init))
    with sharded_init():
        assert dict(vars(nn.init)) == functions
    with pytest.raises(IndexError), sharded_init():
        torch.empty(1)[2]
    assert not torch.empty(1).is_meta
    with sharded_init():
        assert is_deferred(torch.empty(1))
    assert torch.empty(1, device="meta").is_meta


def test_a_usual_construction_imports_neither_compiler_nor_symbolic_shapes():
    code = """
import sys, torch, ds_zero
with ds_zero.sharded_init():
    linear = torch.nn.Linear(3, 3)
    torch.nn.init.normal_(linear.weight)
    torch.nn.init.trunc_normal_(linear.weight)
    linear.bias.data.copy_(torch.randn(3))
print(sorted({"sympy", "torch._dynamo"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_named_device_is_kept():
    with sharded_init():
        assert torch.rand(1, device="cpu").item() >= 0
        assert not torch.zeros(3, device="cpu").is_meta


LOOKS = {
    "item": lambda weight: weight.sum().item(),
    "__bool__": lambda weight: nn.Identity() if weight.sum() > 0 else None,
    "tolist": lambda weight: weight.tolist(),
    "numpy": lambda weight: weight.detach().numpy(),
    "nonzero": lambda weight: weight.nonzero(),
    "index": lambda weight: weight[weight > 0],
    "equal": lambda weight: torch.equal(weight, weight * 2),
    "__float__": lambda weight: math.sqrt(weight[0, 0]),
}


@pytest.mark.parametrize("call", LOOKS)
def test_a_construction_that_looks_at_values_is_refused_with_its_line_and_advice(call):
    line = LOOKS[call].__code__.co_firstlineno
    with sharded_init(), pytest.raises(DeferredInitError) as caught:
        LOOKS[call](nn.Linear(2, 2).weight)
    assert str(caught.value).startswith(f"{call} at {__file__}:{line} looks at a tensor")
    assert "move that part after shard()" in str(caught.value)


def test_changes_after_the_context_are_refused():
    with sharded_init():
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises(
        DeferredInitError, match=r"shape \(2, 2\) was changed after sharded_init\(\) had ended"
    ):
        materialize([model[0].weight])
    with sharded_init():  # does not make it right
        nn.Linear(2, 2)
    with pytest.raises(DeferredInitError, match="was changed after"):
        materialize([model[0].weight])
    materialize([model[1].weight])
    model.to(torch.bfloat16)
    with pytest.raises(DeferredInitError, match="cast or moved outside"):
        materialize([model[1].weight])


def test_a_large_tensor_that_changed_since_it_was_read_is_refused():
    large = torch.arange(30_000.0)
    with sharded_init():
        weight = torch.empty(30_000).copy_(large)
    assert torch.equal(materialize([weight])[0], large)
    large.zero_()
    with pytest.raises(DeferredInitError, match="read was changed afterwards"):
        materialize([weight])


def test_a_meta_tensor_from_outside_has_no_values_to_give():
    outside = torch.empty(3, device="meta")
    with sharded_init():
        weight = torch.ones(3) + outside
        filled = torch.ones(3) + torch.empty(3, device="meta").zero_()
    assert not is_deferred(outside)
    assert torch.equal(materialize([filled])[0], torch.ones(3))
    with pytest.raises(DeferredInitError, match="made outside and has none"):
        materialize([weight])


def test_real_tensors_come_back_as_they_are():
    tensor = torch.ones(2)
    assert materialize([tensor])[0] is tensor
    assert not is_deferred(tensor)
    assert materialize([]) == []


def test_a_large_real_parameter_is_mentioned(caplog):
    with sharded_init():
        module = nn.Module()
        module.weight = nn.Parameter(torch.Tensor(600, 600))
    assert "Module.weight takes 1440000 bytes although built inside sharded_init()" in caplog.text


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Bert", "T5"])
def test_a_transformers_model_gets_the_same_values(family):
    transformers = pytest.importorskip("transformers")
    small = {
        "Llama": {"num_key_value_heads": 1},
        "GPT2": {},
        "Bert": {"is_decoder": False},
        "T5": {"d_kv": 8, "d_ff": 32},
    }
    config = getattr(transformers, f"{family}Config")(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=50,
        **({} if family in ("GPT2", "T5") else {"intermediate_size": 32}),
        **small[family],
    )
    kind = {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel", "Bert": "BertModel", "T5": "T5Model"}
    check_same_values(lambda: getattr(transformers, kind[family])(config))
