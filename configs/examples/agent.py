"""An agent: it plays a game with the policy, through the official OpenAI client."""


async def run(client, prompt, guesses, higher, lower):
    """The reward of a game.

    Args:
        client: an openai.AsyncOpenAI, whose only model is "policy"
        prompt: `text` is the range, such as "38", and `answer` the number
        guesses: calls of a game
        higher, lower: answers to a guess below and above the number

    Returns: 1 for the number; without it half of the share of guesses that were still possible
    """
    number = int(prompt.answer)
    low, high = prompt.meta["range"]
    messages = [{"role": "user", "content": prompt.text}]
    possible = 0
    for _ in range(guesses):
        completion = await client.chat.completions.create(model="policy", messages=messages)
        said = completion.choices[0].message.content
        guess = int(said) if said.isdecimal() else None
        if guess == number:
            return 1.0
        if guess is None:
            answer = "?"
        else:
            possible += low <= guess <= high
            answer = higher if guess < number else lower
            if guess < number:
                low = max(low, guess + 1)
            else:
                high = min(high, guess - 1)
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": answer})
    return 0.5 * possible / guesses
