"""The logit stages as docs/spec/engine.md 4.3 to 4.5 has them: slow loops over one row, nothing kept between steps."""

import math

import numpy as np

f32 = np.float32


def last(history, count):
    """Spec S11."""
    if count == 0:
        return []
    return list(history) if count == -1 else list(history)[-count:]


def processed(logits, params, prompt, output, *, eos_ids=(), breakers=lambda strings: {}, words=()):
    """Stages 1 to 6 on a row: float32 [V] -> float32 [V], each operation rounded to float32.

    `breakers` gives heads with tails, `words` the id sequences of the bad words.
    """
    row = [f32(value) for value in logits]
    history = [*prompt, *output]
    runs = lambda stage: params.samplers is None or stage in params.samplers  # noqa: E731
    window = last(history, params.repeat_last_n)
    with np.errstate(all="ignore"):
        for token, amount in params.logit_bias:
            if amount is not None:
                row[token] = row[token] + f32(amount)
        if runs("penalties"):
            penalty = f32(params.repetition_penalty)
            for token in set(window):
                old = row[token]
                row[token] = min(old / penalty, np.finfo(f32).max) if old > 0 else old * penalty
        if runs("dry"):
            for token, lost in dry(params, history, breakers(params.dry_sequence_breakers)).items():
                row[token] = row[token] - lost
        if runs("penalties"):
            count_penalty(row, list(output), params.frequency_penalty, params.presence_penalty)
            count_penalty(row, window, params.window_frequency_penalty, params.window_presence_penalty)
    for token in removed(params, len(row), list(output), frozenset(eos_ids), words):
        row[token] = f32(-np.inf)
    return np.array(row, f32)


def count_penalty(row, ids, frequency, presence):
    for token in set(ids):
        row[token] = row[token] - (f32(frequency) * f32(ids.count(token)) + f32(presence))


def removed(params, vocab, output, eos_ids, words):
    """Spec S15 to S17."""
    gone = {token for token, amount in params.logit_bias if amount is None}
    if params.allowed_token_ids is not None:
        gone |= set(range(vocab)) - set(params.allowed_token_ids)
    if params.ignore_eos:
        gone |= eos_ids - set(params.stop_token_ids)
    if len(output) < params.min_tokens:
        gone |= eos_ids | set(params.stop_token_ids)
    for ids in words:
        before = list(ids[:-1])
        if not before or (len(output) >= len(before) and output[-len(before) :] == before):
            gone.add(ids[-1])
    return gone


def dry(params, history, heads):
    """Spec 4.5 by trying every place and every length: what each id's logit loses."""
    matches = dry_matches(history, params.dry_penalty_last_n, params.dry_allowed_length, heads)
    if params.dry_multiplier == 0:
        return {}
    base, lost = params.dry_base, {}
    for token, length in matches.items():
        exponent = length - params.dry_allowed_length
        if base > 1.000001:
            exponent = min(exponent, math.floor(88.72283 / math.log(base)))
        lost[token] = f32(min(params.dry_multiplier * base**exponent, float(np.finfo(f32).max)))
    return lost


def dry_matches(history, window, allowed, heads):
    """m of spec 4.5, steps 1 to 4. heads: id -> list of tails, each a list of ids."""
    h = last(history, window)
    n = len(h)
    r = h[::-1]
    if n <= allowed:
        return {}
    limit = n
    for i in range(n):
        tails = [
            tail
            for tail in heads.get(r[i], ())
            if len(tail) <= i and all(tail[o] == r[i - 1 - o] for o in range(len(tail)))
        ]
        if tails:
            limit = i - max(len(tail) for tail in tails)
            break
    if limit < allowed:
        return {}
    m = {}
    for k in range(1, n):
        z = 0
        while k + z < n and r[k + z] == r[z]:
            z += 1
        length = min(z, limit)
        if length >= allowed:
            m[r[k - 1]] = max(m.get(r[k - 1], 0), length)
    return m
