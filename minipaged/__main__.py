"""The `minipaged` command, which is also `python -m minipaged`."""


def main() -> None:
    """Run the command. Ctrl-C ends it quietly, even while its modules are imported."""
    try:
        from minipaged.cli.main import main as command

        command()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
