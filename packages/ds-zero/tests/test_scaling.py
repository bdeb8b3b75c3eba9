"""The loss scale moves as documented, and a backward that escapes it is an error."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ds_zero
from ds_zero import LossScale, LossScaleError, Precision
from ds_zero.scaling import LossScaler
from ds_zero.testing import OddModel, odd_batches, odd_optimizer


def scales(options, overflows):
    scaler = LossScaler(options)
    found = []
    for overflow in overflows:
        scaler.update(overflow=overflow)
        found.append(scaler.scale)
    return found


def test_it_doubles_after_a_window_and_halves_after_the_hysteresis():
    options = LossScale(initial=64, window=2, hysteresis=2)
    assert scales(options, [False, False, False, False]) == [64, 128, 128, 256]
    assert scales(options, [True, True, True]) == [64, 32, 16]
    assert scales(options, [True, False, True]) == [64, 64, 32]
    patient = LossScale(initial=64, window=100, hysteresis=2, restores_hysteresis=True)
    assert scales(patient, [True, False, True]) == [64, 64, 64]
    assert scales(LossScale(initial=64, dynamic=False), [True, False, True] * 5) == [64] * 15
    assert scales(None, [True, False]) == [1, 1]


def test_an_overflow_at_the_minimum_is_an_error_with_advice():
    with pytest.raises(LossScaleError, match=r"overflows at the smallest loss scale, 16: .*use bf16"):
        scales(LossScale(initial=32, minimum=16, hysteresis=1), [True, True])


@given(st.lists(st.booleans(), max_size=40))
def test_the_state_carries_over(overflows):
    options = LossScale(initial=2.0**40, window=3, hysteresis=3)
    half = len(overflows) // 2
    first, second = LossScaler(options), LossScaler(options)
    for overflow in overflows[:half]:
        first.update(overflow=overflow)
    second.load_state_dict(first.state_dict())
    for overflow in overflows[half:]:
        first.update(overflow=overflow)
        second.update(overflow=overflow)
    assert first.state_dict() == second.state_dict()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (LossScale(initial=1, minimum=2), "0 < minimum <= initial"),
        (LossScale(window=0), "window must be at least 1"),
        (LossScale(hysteresis=0), "hysteresis must be at least 1"),
    ],
)
def test_wrong_settings_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        ds_zero.shard(OddModel(), stage=0, precision=Precision(param="fp16", loss_scale=options))


class TwoWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return {"result": (self.head(self.body(x)), [self.body(x)])}


def sharded():
    torch.manual_seed(0)
    model = TwoWays()
    precision = Precision(param="fp16", loss_scale=LossScale(initial=512.0))
    return ds_zero.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, precision=precision)


def test_a_plain_backward_and_a_scaled_loss_give_the_same_gradient():
    found = []
    for explicit in (False, True):
        model, optimizer = sharded()
        output = model(torch.ones(2, 4))["result"][0]
        assert output.dtype is torch.float32
        loss = output.sum()
        (optimizer.scale(loss) if explicit else loss).backward()
        found.append(ds_zero.read_whole(model, "body.weight", "gradient"))
    assert torch.equal(found[0], found[1])
    assert found[0].any()


def test_a_backward_that_does_not_pass_the_outputs_is_an_error():
    model, optimizer = sharded()
    with pytest.raises(ds_zero.ZeroError, match=r"call optimizer\.scale\(loss\)\.backward\(\)"):
        model.body(torch.ones(2, 4).half()).float().sum().backward()
    optimizer.zero_grad()
    optimizer.scale(model.body(torch.ones(2, 4).half()).float().sum()).backward()
    optimizer.step()
    assert not optimizer.step_skipped


def test_evaluation_and_tiny_gradients():
    model, optimizer = sharded()
    with torch.no_grad():
        assert model(torch.ones(2, 4))["result"][0].dtype is torch.float16
    (model(torch.ones(2, 4))["result"][0].sum() * 1e-6).backward()  # below fp16's smallest without the scale
    assert ds_zero.read_whole(model, "head.bias", "gradient").item() == pytest.approx(2e-6, rel=1e-2)
    optimizer.step()


def test_the_overflow_at_the_minimum_ends_training():
    torch.manual_seed(0)
    model = OddModel()
    precision = Precision(param="fp16", loss_scale=LossScale(initial=2, minimum=1, hysteresis=1))
    model, optimizer = ds_zero.shard(model, odd_optimizer(model), stage=1, precision=precision)
    (model(odd_batches(1)[0]) * float("inf")).backward()
    optimizer.step()
    assert optimizer.step_skipped
    assert optimizer.loss_scale == 1
    with pytest.raises(LossScaleError, match="overflows at the smallest loss scale, 1"):
        optimizer.step()
