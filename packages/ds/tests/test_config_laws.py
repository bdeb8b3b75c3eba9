"""Every key that is known, written wrongly, is refused with a key that is known there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ds
from ds.config_reader import known_at, known_paths, read_config


@st.composite
def typos(draw):
    """A known path, and the same with one letter of its last key lost or doubled, which no key there has."""
    path = draw(st.sampled_from(sorted(path for path in known_paths() if len(path.split(".")[-1]) > 3)))
    section, _, key = path.rpartition(".")
    at = draw(st.integers(0, len(key) - 1))
    wrong = draw(st.sampled_from([key[:at] + key[at + 1 :], key[:at] + key[at] + key[at:]]))
    prefix = f"{section}." if section else ""
    return path, prefix + wrong, wrong in set(known_at(section))


@given(typos())
def test_a_typo_is_refused_with_a_known_key(typo):
    path, wrong, happens_to_be_known = typo
    if happens_to_be_known:
        return
    config = {}
    for part in reversed(wrong.split(".")):
        config = {part: config}
    with pytest.raises(ds.ConfigError) as caught:
        read_config(config)
    section = path.rpartition(".")[0]
    said = next(reason for reason in caught.value.reasons if reason.startswith(f"{wrong}: unknown key; "))
    suggested = said.rpartition("did you mean ")[2].removesuffix("?").removeprefix(f"{section}.")
    assert suggested in set(known_at(section))
