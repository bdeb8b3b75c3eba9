"""Any JSON whatever: a configuration or a ConfigError, never another error, and the given dict as it was."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from ds.config import Config, ConfigError
from ds.config_reader import known_paths, read_config

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10**12)
    | st.floats()
    | st.sampled_from(["auto", "none", "cpu", "Adam", "WarmupLR", ""])
)
NAMES = st.sampled_from(sorted({part for path in known_paths() for part in path.split(".")})) | st.text(
    max_size=5
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4)
)


def reasons(config, ranks=None):
    try:
        assert isinstance(read_config(config, data_parallel_size=ranks), Config)
    except ConfigError as error:
        return error.reasons or ("nothing",)
    return ()


@given(st.dictionaries(NAMES, VALUES, max_size=6), st.none() | st.integers(1, 5))
def test_anything_is_a_configuration_or_a_named_mistake(config, ranks):
    before = repr(copy.deepcopy(config))
    assert all(": " in reason for reason in reasons(config, ranks))
    assert repr(config) == before


@given(st.sampled_from(sorted(known_paths())), LEAVES)
def test_every_known_path_with_any_value(path, value):
    config = value
    for part in reversed(path.split(".")):
        config = {part: config}
    for reason in reasons(config):
        assert reason.startswith(path.split(".")[0])
        assert "unknown key" not in reason
