// Tile numbers of the portable family. README.md has the table with its reasons.
#pragma once

#include "cuda/flash/portable/gradient_step.cuh"
#include "cuda/tile/products.cuh"
#include "cuda/tile/split_products.cuh"

namespace flashattn::cuda::portable {

// Up to so many columns fp32 multiply-adds are the more exact: their chains are short (note 0014).
inline constexpr int kShortFp32 = 32;

// The shared memory of a block decides tiles: 99 KB (sm_86, sm_89, sm_120), 163 KB (sm_80) or 227
// KB (sm_90, sm_100). Device code knows at compile time; the host asks what the code was compiled
// for (forward_launch.cuh).
enum class Room { small, medium, large };
constexpr Room room_of(int arch) {
  return arch == 80 || arch == 87   ? Room::medium
         : arch < 90 || arch >= 120 ? Room::small
                                    : Room::large;
}
constexpr int kilobytes(Room room) {
  return room == Room::small ? 99 : room == Room::medium ? 163 : 227;
}
#if defined(__CUDA_ARCH__)
inline constexpr Room kDeviceRoom = room_of(__CUDA_ARCH__ / 10);
#else
inline constexpr Room kDeviceRoom = Room::large;  // of no consequence
#endif

// A block handles Rows query rows, Keys keys at a time, and ValueDim columns of value and out.
// Where tiles of HeadDim columns do not fit into shared memory, scores are made Depth columns at a
// time. With two stages the keys and values of the next tile arrive while those of this are used.
template <class Arithmetic_, int HeadDim, int Depth, int ValueDim, int Rows, int Keys, int Warps,
          int Blocks, int Stages = 1>
struct ForwardTile {
  using Arithmetic = Arithmetic_;
  static constexpr int kHeadDim = HeadDim, kDepth = Depth, kValueDim = ValueDim;
  static constexpr int kRows = Rows, kKeys = Keys;
  static constexpr int kWarps = Warps, kThreads = 32 * Warps;
  static constexpr int kBlocksPerMultiprocessor = Blocks;
  static constexpr int kFragments = Rows / (16 * Warps);  // 16-row fragments of a warp
  static constexpr int kStages = Stages;
  static constexpr bool kWhole = Depth == HeadDim;
  static_assert(kWhole || Stages == 1);
  template <Room>
  using For = ForwardTile;  // the same on every GPU
};

// Two stages where they leave room for all blocks.
template <class Arithmetic, int HeadDim, int Rows, int Keys, int Warps, int Blocks>
struct StagedForwardTile {
  static constexpr int kBytes =
      (Rows + 4 * Keys) * HeadDim * static_cast<int>(sizeof(typename Arithmetic::Element));
  template <Room room>
  using For = ForwardTile < Arithmetic,
        HeadDim, HeadDim, HeadDim, Rows, Keys, Warps, Blocks,
        Blocks* kBytes<kilobytes(room) * 1024 ? 2 : 1>;
};

template <class Arithmetic, int HeadDim, ScoreKind kind>
struct ForwardTiles;
template <class Arithmetic, int HeadDim, ScoreKind kind, Room room>
struct BackwardTiles;

// The tile that device code is compiled for.
template <class Tiles>
using DeviceTile = typename Tiles::template For<kDeviceRoom>;
template <class Arithmetic, int HeadDim, ScoreKind kind>
struct BackwardTilesOf {
  template <Room room>
  using For = BackwardTiles<Arithmetic, HeadDim, kind, room>;
};

#define FLASHATTN_FORWARD(Arithmetic, HeadDim, kind, ...)   \
  template <>                                               \
  struct ForwardTiles<Arithmetic, HeadDim, ScoreKind::kind> \
      : ForwardTile<Arithmetic, HeadDim, __VA_ARGS__> {}
#define FLASHATTN_FORWARD_16BIT(HeadDim, kind, ...)                    \
  FLASHATTN_FORWARD(TensorCores<float16>, HeadDim, kind, __VA_ARGS__); \
  FLASHATTN_FORWARD(TensorCores<bfloat16>, HeadDim, kind, __VA_ARGS__)

//                            depth value rows keys warps blocks
FLASHATTN_FORWARD_16BIT(96, plain, 96, 96, 128, 64, 4, 2);
FLASHATTN_FORWARD_16BIT(192, plain, 192, 192, 64, 64, 4, 2);
FLASHATTN_FORWARD_16BIT(256, plain, 256, 256, 64, 64, 4, 2);
FLASHATTN_FORWARD_16BIT(64, dropped, 64, 64, 128, 64, 4, 3);
FLASHATTN_FORWARD_16BIT(256, dropped, 256, 256, 64, 64, 4, 2);
FLASHATTN_FORWARD_16BIT(64, masked, 64, 64, 128, 64, 4, 3);
FLASHATTN_FORWARD_16BIT(128, masked, 128, 128, 128, 64, 4, 2);
FLASHATTN_FORWARD_16BIT(256, masked, 256, 256, 64, 32, 4, 2);
FLASHATTN_FORWARD_16BIT(64, general, 64, 64, 64, 64, 4, 4);
FLASHATTN_FORWARD_16BIT(128, general, 128, 128, 64, 64, 4, 3);
FLASHATTN_FORWARD_16BIT(256, general, 256, 256, 64, 32, 4, 2);
FLASHATTN_FORWARD_16BIT(512, general, 128, 128, 64, 32, 4, 2);
FLASHATTN_FORWARD(SplitTensorCores<Side::left>, 64, plain, 64, 64, 128, 64, 4, 2);
FLASHATTN_FORWARD(SplitTensorCores<Side::left>, 128, plain, 128, 128, 128, 32, 4, 2);
FLASHATTN_FORWARD(MultiplyAdds<float>, 32, general, 32, 32, 64, 64, 4, 3);
FLASHATTN_FORWARD(SplitTensorCores<Side::left>, 64, general, 64, 64, 64, 64, 4, 2);
FLASHATTN_FORWARD(SplitTensorCores<Side::left>, 128, general, 128, 128, 64, 32, 4, 2);
FLASHATTN_FORWARD(SplitTensorCores<Side::left>, 512, general, 64, 64, 64, 32, 4, 2);
FLASHATTN_FORWARD(MultiplyAdds<double>, 64, general, 64, 64, 32, 32, 2, 2);
FLASHATTN_FORWARD(MultiplyAdds<double>, 512, general, 32, 32, 32, 32, 2, 2);
template <class Element>
struct ForwardTiles<TensorCores<Element>, 64, ScoreKind::plain>
    : StagedForwardTile<TensorCores<Element>, 64, 128, 64, 4, 3> {};
template <class Element>
struct ForwardTiles<TensorCores<Element>, 128, ScoreKind::plain>
    : StagedForwardTile<TensorCores<Element>, 128, 128, 64, 4, 2> {};
template <class Element>
struct ForwardTiles<TensorCores<Element>, 128, ScoreKind::dropped>
    : StagedForwardTile<TensorCores<Element>, 128, 128, 64, 4, 2> {};
// Few query rows read their keys once: what counts is how many blocks have loads in flight.
inline constexpr int kFewRows = 16;
template <class Arithmetic, int HeadDim>
using FewRowsTile =
    ForwardTile<Arithmetic, HeadDim, HeadDim, HeadDim, kFewRows,
                HeadDim * sizeof(typename Arithmetic::Element) <= 256 ? 64 : 32, 1, 4>;
#undef FLASHATTN_FORWARD_16BIT
#undef FLASHATTN_FORWARD

#define FLASHATTN_BACKWARD(Arithmetic, HeadDim, kind, room, ...)         \
  template <>                                                            \
  struct BackwardTiles<Arithmetic, HeadDim, ScoreKind::kind, Room::room> \
      : BackwardTile<Arithmetic, HeadDim, __VA_ARGS__> {}
#define FLASHATTN_BACKWARD_16BIT(HeadDim, kind, room, ...)                    \
  FLASHATTN_BACKWARD(TensorCores<float16>, HeadDim, kind, room, __VA_ARGS__); \
  FLASHATTN_BACKWARD(TensorCores<bfloat16>, HeadDim, kind, room, __VA_ARGS__)

//                                        depth slice keys rows  warps: key column query  stages
//                                        blocks
FLASHATTN_BACKWARD_16BIT(64, plain, small, 64, 64, 128, 32, 4, 1, 1, 2, 1);
FLASHATTN_BACKWARD_16BIT(64, plain, medium, 64, 64, 128, 32, 4, 1, 1, 2, 2);
FLASHATTN_BACKWARD_16BIT(64, plain, large, 64, 64, 128, 32, 4, 1, 1, 2, 2);
FLASHATTN_BACKWARD_16BIT(64, general, small, 64, 64, 128, 32, 8, 1, 2, 2, 1);
FLASHATTN_BACKWARD_16BIT(64, general, medium, 64, 64, 128, 32, 4, 1, 1, 2, 2);
FLASHATTN_BACKWARD_16BIT(64, general, large, 64, 64, 128, 32, 4, 1, 1, 2, 2);
FLASHATTN_BACKWARD_16BIT(128, plain, small, 128, 128, 64, 32, 4, 1, 2, 2, 1);
FLASHATTN_BACKWARD_16BIT(128, plain, medium, 128, 128, 128, 64, 8, 1, 4, 2, 1);
FLASHATTN_BACKWARD_16BIT(128, plain, large, 128, 128, 128, 64, 2, 4, 2, 2, 1);
FLASHATTN_BACKWARD_16BIT(128, general, small, 128, 128, 64, 32, 4, 1, 2, 2, 1);
FLASHATTN_BACKWARD_16BIT(128, general, medium, 128, 128, 128, 32, 8, 1, 2, 2, 1);
FLASHATTN_BACKWARD_16BIT(128, general, large, 128, 128, 128, 64, 2, 4, 2, 2, 1);
FLASHATTN_BACKWARD_16BIT(256, plain, small, 256, 256, 32, 32, 2, 2, 2, 1, 1);
FLASHATTN_BACKWARD_16BIT(256, plain, medium, 256, 256, 64, 64, 2, 4, 2, 1, 1);
FLASHATTN_BACKWARD_16BIT(256, plain, large, 256, 256, 64, 64, 2, 4, 2, 2, 1);
FLASHATTN_BACKWARD_16BIT(256, general, small, 256, 256, 32, 32, 2, 2, 2, 1, 1);
FLASHATTN_BACKWARD_16BIT(256, general, medium, 256, 256, 64, 32, 4, 2, 2, 1, 1);
FLASHATTN_BACKWARD_16BIT(256, general, large, 256, 256, 64, 64, 2, 4, 2, 1, 1);
#undef FLASHATTN_BACKWARD_16BIT

template <class Arithmetic, int HeadDim, Room room>
struct BackwardTiles<Arithmetic, HeadDim, ScoreKind::dropped, room>
    : BackwardTiles<Arithmetic, HeadDim, ScoreKind::plain, room> {};

FLASHATTN_BACKWARD(SplitTensorCores<Side::left>, 64, plain, small, 64, 64, 64, 64, 2, 2, 2, 1, 1);
FLASHATTN_BACKWARD(SplitTensorCores<Side::left>, 64, plain, medium, 64, 64, 64, 64, 2, 2, 2, 1, 1);
FLASHATTN_BACKWARD(SplitTensorCores<Side::left>, 64, plain, large, 64, 64, 64, 64, 2, 2, 2, 1, 2);
FLASHATTN_BACKWARD(SplitTensorCores<Side::left>, 128, plain, small, 128, 128, 32, 32, 2, 2, 1, 1,
                   1);
FLASHATTN_BACKWARD(SplitTensorCores<Side::left>, 128, plain, medium, 128, 128, 64, 32, 2, 2, 1, 1,
                   1);
FLASHATTN_BACKWARD(SplitTensorCores<Side::left>, 128, plain, large, 128, 128, 64, 64, 2, 4, 2, 2,
                   1);

// The tiles that fit every GPU.
#define FLASHATTN_BACKWARD_ANY(Arithmetic, HeadDim, ...)              \
  template <Room room>                                                \
  struct BackwardTiles<Arithmetic, HeadDim, ScoreKind::general, room> \
      : BackwardTile<Arithmetic, HeadDim, __VA_ARGS__> {}
FLASHATTN_BACKWARD_ANY(TensorCores<float16>, 512, 128, 128, 64, 32, 4, 1, 2, 1, 1);
FLASHATTN_BACKWARD_ANY(TensorCores<bfloat16>, 512, 128, 128, 64, 32, 4, 1, 2, 1, 1);
FLASHATTN_BACKWARD_ANY(MultiplyAdds<float>, 32, 32, 32, 64, 32, 4, 1, 2, 1, 3);
FLASHATTN_BACKWARD_ANY(SplitTensorCores<Side::left>, 64, 64, 64, 64, 32, 2, 2, 2, 1, 2);
FLASHATTN_BACKWARD_ANY(SplitTensorCores<Side::left>, 128, 128, 128, 32, 32, 2, 2, 2, 1, 1);
FLASHATTN_BACKWARD_ANY(SplitTensorCores<Side::left>, 512, 64, 64, 32, 32, 2, 2, 2, 1, 1);
FLASHATTN_BACKWARD_ANY(MultiplyAdds<double>, 64, 64, 64, 32, 32, 2, 2, 2, 1, 1);
FLASHATTN_BACKWARD_ANY(MultiplyAdds<double>, 512, 32, 32, 32, 32, 2, 2, 2, 1, 1);
#undef FLASHATTN_BACKWARD_ANY
#undef FLASHATTN_BACKWARD

}  // namespace flashattn::cuda::portable
