"""A real MCP server on stdio, made with the protocol's own library; run as a script by the tests of
``MCPEnv``."""

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("for-tests")
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360000000020001e221bc330000"
    "000049454e44ae426082"
)


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def split(number: int) -> dict[str, int]:
    """Tens and ones."""
    return {"tens": number // 10, "ones": number % 10}


@server.tool()
def fail(why: str) -> str:
    """Fails."""
    raise ToolError(why)


@server.tool()
def picture() -> Image:
    """One pixel."""
    return Image(data=PIXEL, format="png")


if __name__ == "__main__":
    server.run("stdio")
