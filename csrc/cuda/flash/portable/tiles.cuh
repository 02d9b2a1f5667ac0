// Tile numbers of the portable family. README.md has the table with its reasons.
#pragma once

#include "cuda/tile/products.cuh"

namespace flashattn::cuda::portable {

// A block handles Rows query rows, Keys keys at a time, and ValueDim columns of value and out.
template <class Arithmetic_, int HeadDim, int ValueDim, int Rows, int Keys, int Warps, int Blocks>
struct ForwardTile {
  using Arithmetic = Arithmetic_;
  static constexpr int kHeadDim = HeadDim, kValueDim = ValueDim;
  static constexpr int kRows = Rows, kKeys = Keys;
  static constexpr int kWarps = Warps, kThreads = 32 * Warps;
  static constexpr int kBlocksPerMultiprocessor = Blocks;
  static constexpr int kFragments = Rows / (16 * Warps);  // 16-row fragments of a warp
};

template <class Arithmetic, int HeadDim>
struct ForwardTileOf;

template <class E>
struct ForwardTileOf<TensorCores<E>, 64> : ForwardTile<TensorCores<E>, 64, 64, 128, 64, 4, 2> {};
template <class E>
struct ForwardTileOf<TensorCores<E>, 96> : ForwardTile<TensorCores<E>, 96, 96, 128, 64, 4, 2> {};
template <class E>
struct ForwardTileOf<TensorCores<E>, 128> : ForwardTile<TensorCores<E>, 128, 128, 128, 64, 4, 2> {};
template <class E>
struct ForwardTileOf<TensorCores<E>, 192> : ForwardTile<TensorCores<E>, 192, 192, 128, 64, 8, 1> {};
template <class E>
struct ForwardTileOf<TensorCores<E>, 256> : ForwardTile<TensorCores<E>, 256, 256, 128, 64, 8, 1> {};
template <class E>
struct ForwardTileOf<TensorCores<E>, 512> : ForwardTile<TensorCores<E>, 512, 256, 64, 32, 4, 1> {};

template <>
struct ForwardTileOf<MultiplyAdds<float>, 64>
    : ForwardTile<MultiplyAdds<float>, 64, 64, 128, 64, 4, 2> {};
template <>
struct ForwardTileOf<MultiplyAdds<float>, 128>
    : ForwardTile<MultiplyAdds<float>, 128, 128, 64, 64, 4, 1> {};
template <>
struct ForwardTileOf<MultiplyAdds<float>, 512>
    : ForwardTile<MultiplyAdds<float>, 512, 128, 32, 32, 2, 1> {};

template <>
struct ForwardTileOf<MultiplyAdds<double>, 64>
    : ForwardTile<MultiplyAdds<double>, 64, 64, 32, 32, 2, 2> {};
template <>
struct ForwardTileOf<MultiplyAdds<double>, 128>
    : ForwardTile<MultiplyAdds<double>, 128, 64, 32, 32, 2, 1> {};
template <>
struct ForwardTileOf<MultiplyAdds<double>, 512>
    : ForwardTile<MultiplyAdds<double>, 512, 64, 16, 32, 1, 1> {};

}  // namespace flashattn::cuda::portable
