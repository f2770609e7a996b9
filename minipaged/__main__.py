"""The `minipaged` command, which is also `python -m minipaged`."""

import gc


def main() -> None:
    """Run the command. Ctrl-C ends it quietly, even while its modules are imported."""
    try:
        from minipaged.cli.main import main as command

        command()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        gc.freeze()  # or the interpreter ends with a second's search for garbage in torch and transformers


if __name__ == "__main__":
    main()
