"""Prints the expected numbers of philox_test.cpp and dropout_test.cpp.

A second implementation, written from the paper and from the dropout rule rather than from the C++,
in Python's unbounded integers.
"""

MASK = 0xFFFFFFFF


def philox4x32(counter, key, rounds):
    c, k = list(counter), list(key)
    for _ in range(rounds):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ k[0], q & MASK, (p >> 32) ^ c[3] ^ k[1], p & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def keep(seed, offset, batch, heads_q, head, row, col, threshold):
    position = (offset + batch * heads_q + head) % 2**64
    group = col // 32 * 4 + col // 2 % 4
    number = col // 8 % 4 * 2 + col % 2
    words = philox4x32(
        [position & MASK, position >> 32, row, group], [seed & MASK, (seed >> 32) & MASK], 7
    )
    word = words[number // 2]
    return ((word >> 16) if number % 2 else (word & 0xFFFF)) < threshold


def main():
    print("Philox4x32-7")
    for counter, key in [
        ([1, 2, 3, 4], [5, 6]),
        ([0xDEADBEEF, 0, 0x80000000, 0x7FFFFFFF], [0x12345678, 0x9ABCDEF0]),
        ([0, 0, 0, 1], [0, 0]),
    ]:
        print(" ".join(f"{word:08x}" for word in philox4x32(counter, key, 7)))

    print("32 columns kept at p = 0.5: batch 1 of 3 heads, head 2; bit j is column first + j")
    for seed, offset, row, first in [
        (1234567890123456789, 77, 5, 0),
        (-1, 2**63 - 4, 70000, 96),
        (42, -6, 0, 1 << 20),
    ]:
        kept = [keep(seed, offset, 1, 3, 2, row, first + j, 32768) for j in range(32)]
        print(f"{sum(bit << j for j, bit in enumerate(kept)):08x}")


if __name__ == "__main__":
    main()
