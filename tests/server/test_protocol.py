"""What one process sends is what the other gets."""

from dataclasses import fields

from server import protocol

FILLED = protocol.Sampling(
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    min_p=0.1,
    typical_p=0.8,
    repetition_penalty=1.1,
    frequency_penalty=0.2,
    presence_penalty=0.3,
    logit_bias={5: -1.5},
    allowed_tokens=b"\6",
    bad_words=[[3, 4]],
    logprob_token_ids=[6],
    seed=2**62,
    choice=7,
)


def test_a_bitmap_has_a_bit_for_each_id() -> None:
    assert [protocol.bitmap(ids) for ids in ((), [0], [9, 1, 2, 9])] == [b"", b"\1", b"\6\2"]


def test_every_field_of_a_draw_reaches_the_engine() -> None:
    untouched = [
        field.name
        for field in fields(FILLED)
        if getattr(FILLED, field.name) == getattr(protocol.Sampling(), field.name)
    ]
    assert untouched == [], "give each field of Sampling a value of its own above"
    submit = protocol.Submit(1, [1], [], 5, 0, [0], FILLED)
    assert protocol.decode_to_engine(protocol.encode(submit)) == submit
