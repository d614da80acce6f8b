// Holds the sessions of its input, [{url, token}], all at once: a streamed call of a tool, its answer, and an answer
// to it; and an answer in the form of responses. Prints, for each, what it was told.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const tools = [{ type: "function", function: { name: "add", parameters: { type: "object" } } }];

async function hold({ url, token }) {
  const client = new OpenAI({ baseURL: url, apiKey: token });
  const messages = [{ role: "user", content: url }];
  const asked = { model: "policy", messages, tools, stream_options: { include_usage: true } };
  const stream = client.chat.completions.stream(asked);
  let pieces = 0;
  stream.on("chunk", () => pieces++);
  const call = await stream.finalMessage();
  messages.push(call, { role: "tool", tool_call_id: call.tool_calls[0].id, content: "5" });
  const told = await client.chat.completions.create({ model: "policy", messages, tools });
  const response = await client.responses.create({ model: "policy", input: "what?" });
  const usage = await stream.totalUsage();
  return {
    pieces,
    arguments: call.tool_calls[0].function.arguments,
    drawn: usage.completion_tokens,
    content: told.choices[0].message.content,
    response: response.output_text,
  };
}

const sessions = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(await Promise.all(sessions.map(hold))));
