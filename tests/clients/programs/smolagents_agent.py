from smolagents import CodeAgent, OpenAIModel, tool


@tool
def following(number: int) -> int:
    """The number that follows.

    Args:
        number: the number before
    """
    return number + 7


def plain(client, row, **more):
    model = OpenAIModel("policy", api_base=str(client.base_url), api_key=client.api_key)
    agent = CodeAgent(tools=[following], model=model, max_steps=100, verbosity_level=0, **more)
    return float(str(agent.run(row["prompt"])).endswith(row["answer"]))


def streamed(client, row):
    return plain(client, row, stream_outputs=True)
