"""A program with functions for a pool that it starts itself."""

from gda.testing import Pool


def num_devices() -> int:
    import jax

    return jax.device_count()


if __name__ == "__main__":
    with Pool(2, devices=2) as pool:
        print(pool.run(num_devices))
