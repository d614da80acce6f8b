"""A harness that runs what the model says as a command, in the task's runtime."""

import httpx
import verifiers.v1 as vf

__all__ = ["ShellHarness"]


class ShellHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        async with httpx.AsyncClient(timeout=60) as http:
            told = await http.post(
                f"{endpoint}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]},
            )
        told.raise_for_status()
        return await runtime.run(["sh", "-c", told.json()["choices"][0]["message"]["content"]], {})
