import verifiers.v1 as vf

CAPITALS = {"France": "Paris", "Peru": "Lima"}


class Atlas(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def capital(self, country: str) -> str:
        """The capital of a country."""
        return CAPITALS.get(country, "unknown")


if __name__ == "__main__":
    Atlas.run()
