"""Which weights samples are drawn from."""

from tinker import types

from tests.tinker.served import client, datum

WHOLE = types.ModelInput.from_ints([1, 5, 3, 8])


def test_weights_that_are_saved_again_under_their_name_are_the_ones_sampled_from(url: str) -> None:
    service = client(url)
    training = service.create_lora_training_client("tiny").result()
    row = datum([1, 5, 3, 8], weights=[1.0] * 3)
    found = []
    for _ in range(2):
        training.forward_backward([row], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=2e-2)).result()
        path = training.save_weights_for_sampler("latest").result().path
        sampler = service.create_sampling_client(model_path=path).result()
        found.append(sampler.compute_logprobs(WHOLE).result()[1:])
    assert found[0] != found[1]
    service.close("success").result()
