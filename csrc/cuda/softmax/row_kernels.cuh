// The kernels for rows (inner == 1): warp, block and online. `select.h` says which one runs.
#pragma once

#include "cuda/softmax/reduce.cuh"
#include "cuda/softmax/row.cuh"

namespace flashattn::cuda {

// `Chunks` chunks of every operand in registers: chunks start, start + step, start + 2 * step, ...
template <class Direction, int Chunks>
struct Fragment {
  using Read = typename Direction::Read;
  using State = typename Direction::State;
  static constexpr int kChunk = Chunk<Read>::kSize;

  Chunk<Read> data[Chunks][Direction::kOperands];

  // The whole chunks first, so that their loads are in flight together.
  __device__ void load(const Row<Direction>& row, int start, int step) {
#pragma unroll
    for (int k = 0; k < Chunks; ++k) {
#pragma unroll
      for (int o = 0; o < Direction::kOperands; ++o) {
        const int first = row.first(start + k * step);
        if (row.can_load_whole(o, first)) data[k][o] = row.load_whole(o, first);
      }
    }
#pragma unroll
    for (int k = 0; k < Chunks; ++k) {
#pragma unroll
      for (int o = 0; o < Direction::kOperands; ++o) {
        const int first = row.first(start + k * step);
        if (!row.can_load_whole(o, first)) data[k][o] = row.load_elements(o, first);
      }
    }
  }

  __device__ State add_to(State state, const Direction& direction) const {
    return direction.template add<Chunks * kChunk>(state, [this](int o, int i) {
      return convert<typename Direction::Real>(data[i / kChunk][o].element[i % kChunk]);
    });
  }

  __device__ void store(const Direction& direction, const Row<Direction>& row, int start, int step,
                        typename Direction::Totals totals) const {
#pragma unroll
    for (int k = 0; k < Chunks; ++k) {
      row.store(direction, row.first(start + k * step), data[k], totals);
    }
  }
};

// Short rows: `lanes` neighbouring lanes hold a row, a thread holds `Chunks` chunks of each of
// `Rows` rows. Neighbouring groups of lanes take neighbouring rows.
template <class Direction, int Rows, int Chunks>
__global__ void __launch_bounds__(128)
    softmax_warp_kernel(const __grid_constant__ Tensors<Direction> tensors, Direction direction,
                        int lanes) {
  const int groups = blockDim.x / lanes;
  const int group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const int64_t first_row = int64_t{blockIdx.x} * groups * Rows + group;

  Row<Direction> row[Rows];
  Fragment<Direction, Chunks> fragment[Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    const int64_t index = first_row + r * groups;
    const bool exists = index < tensors.shape.outer;  // a row past the end is one of length 0
    row[r] = Row<Direction>(tensors, exists ? index : 0, 0, exists ? tensors.shape.length : 0);
    fragment[r].load(row[r], lane, lanes);
  }
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    const auto mine = fragment[r].add_to(Direction::empty(), direction);
    const auto totals = direction.totals(join_lanes<Direction>(mine, lanes));
    fragment[r].store(direction, row[r], lane, lanes, totals);
  }
}

// Middle rows: a block, or the blocks of a cluster, hold one row in shared memory. A thread reads
// back only what it has loaded itself, so the reduction's barrier is the only one.
template <class Direction>
__global__ void __launch_bounds__(512)
    softmax_block_kernel(const __grid_constant__ Tensors<Direction> tensors, Direction direction,
                         int cluster, int block_chunks) {
  using State = typename Direction::State;
  using Chunks = typename Row<Direction>::OperandChunks;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ State warp_states[32];
  __shared__ State block_state;
  Chunks* const held = reinterpret_cast<Chunks*>(shared);  // (block_chunks)
  const int begin = blockIdx.x % cluster * block_chunks;
  const Row<Direction> row(tensors, blockIdx.x / cluster, 0, tensors.shape.length);
  const int count = min(block_chunks, row.chunks() - begin);

  for (int c = threadIdx.x; c < count; c += blockDim.x) {
    const int first = row.first(begin + c);
#pragma unroll
    for (int o = 0; o < Direction::kOperands; ++o) {
      if (row.can_load_whole(o, first)) {
        row.load_whole_async(o, first, &held[c][o]);
      } else {
        held[c][o] = row.load_elements(o, first);
      }
    }
  }
  __pipeline_commit();
  __pipeline_wait_prior(0);

  State state = Direction::empty();
  for (int c = threadIdx.x; c < count; c += blockDim.x) {
    state = direction.template add<Row<Direction>::kChunk>(state,
                                                           ChunkElements<Direction>{held[c]});
  }
  state = join_block<Direction>(state, warp_states);
  if (cluster > 1) state = join_cluster<Direction>(state, block_state);
  const auto totals = direction.totals(state);
  for (int c = threadIdx.x; c < count; c += blockDim.x) {
    row.store(direction, row.first(begin + c), held[c], totals);
  }
}

// Long or few rows: each row is cut into `count` pieces of `length` elements, a piece per block.
struct Pieces {
  int64_t count, length;
};

template <class Direction>  // of each operand, in registers at a time
inline constexpr int kOnlineChunks = 4 / Direction::kOperands;

template <class Direction>
__device__ Row<Direction> piece_of(const Tensors<Direction>& tensors, int64_t index,
                                   Pieces pieces) {
  const int64_t begin = index % pieces.count * pieces.length;
  const int64_t end = begin + pieces.length;
  return Row<Direction>(tensors, index / pieces.count, begin,
                        end < tensors.shape.length ? end : tensors.shape.length);
}

// First pass: the State of each piece.
template <class Direction>
__global__ void __launch_bounds__(256)
    softmax_online_states_kernel(const __grid_constant__ Tensors<Direction> tensors,
                                 Direction direction, Pieces pieces,
                                 typename Direction::State* states /* (outer, pieces) */) {
  using State = typename Direction::State;
  __shared__ State warp_states[32];
  const Row<Direction> piece = piece_of(tensors, blockIdx.x, pieces);

  State state = Direction::empty();
  const int chunks = piece.chunks();
  const int step = kOnlineChunks<Direction> * blockDim.x;
  for (int start = threadIdx.x; start < chunks; start += step) {
    Fragment<Direction, kOnlineChunks<Direction>> fragment;
    fragment.load(piece, start, blockDim.x);
    state = fragment.add_to(state, direction);
  }
  state = join_block<Direction>(state, warp_states);
  if (threadIdx.x == 0) states[blockIdx.x] = state;
}

// Second pass: joins the States of a row and writes the results of a piece. Pieces are taken from
// the last to the first, since the last ones read are those that L2 still holds.
template <class Direction>
__global__ void __launch_bounds__(256)
    softmax_online_results_kernel(const __grid_constant__ Tensors<Direction> tensors,
                                  Direction direction, Pieces pieces,
                                  const typename Direction::State* states /* (outer, pieces) */) {
  using State = typename Direction::State;
  __shared__ State warp_states[32];
  const int64_t index = gridDim.x - 1 - int64_t{blockIdx.x};
  const int64_t row = index / pieces.count;
  const Row<Direction> piece = piece_of(tensors, index, pieces);

  State state = Direction::empty();
  for (int64_t p = threadIdx.x; p < pieces.count; p += blockDim.x) {
    state = Direction::join(state, states[row * pieces.count + p]);
  }
  const auto totals = direction.totals(join_block<Direction>(state, warp_states));

  const int chunks = piece.chunks();
  const int step = kOnlineChunks<Direction> * blockDim.x;
  for (int start = threadIdx.x; start < chunks; start += step) {
    Fragment<Direction, kOnlineChunks<Direction>> fragment;
    fragment.load(piece, start, blockDim.x);
    fragment.store(direction, piece, start, blockDim.x, totals);
  }
}

}  // namespace flashattn::cuda
