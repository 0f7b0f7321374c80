// The AI SDK; the argument is the provider, with its default API.
import { readFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const task = JSON.parse(readFileSync(0, "utf8").split("\n")[0]);
const provider = process.argv[2] === "anthropic" ? createAnthropic() : createOpenAI();
const add = tool({
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});
const answer = await generateText({
  model: provider(task.model),
  tools: { add },
  stopWhen: stepCountIs(9),
  prompt: task.messages.at(-1).content,
});
console.log(answer.text);
