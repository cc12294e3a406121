"""A server of the Model Context Protocol on stdio for the stock of the warehouses.

    python -m vf_mcp_demo.server --seed 0

Its tools are read-only, so rollouts can share one server.
"""

from __future__ import annotations

import argparse

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from vf_mcp_demo.catalogue import WAREHOUSES, make_catalogue


def make_server(seed: int) -> MCPServer:
    """The server with the catalogue of a seed."""
    catalogue = make_catalogue(seed)
    server: MCPServer = MCPServer("warehouse")

    @server.tool()
    def list_warehouses() -> str:
        """Names of the warehouses."""
        return ", ".join(WAREHOUSES)

    @server.tool()
    def list_items() -> str:
        """Names of all items."""
        return ", ".join(catalogue)

    @server.tool()
    def get_stock(item: str, warehouse: str) -> int:
        """Pieces of an item in a warehouse."""
        entry = catalogue.get(item)
        if entry is None:
            raise ToolError(f"there is no item {item!r}; list_items names all")
        if warehouse not in entry.stock:
            raise ToolError(f"there is no warehouse {warehouse!r}; list_warehouses names all")
        return entry.stock[warehouse]

    @server.tool()
    def get_price(item: str) -> int:
        """Price of a piece of an item, in cents."""
        entry = catalogue.get(item)
        if entry is None:
            raise ToolError(f"there is no item {item!r}; list_items names all")
        return entry.price_cents

    return server


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="chooses the stock")
    make_server(parser.parse_args().seed).run("stdio")
