// Fills a mask's summary, before the kernels that read it.
#pragma once

#include "cuda/attend/mask_summary.cuh"
#include "cuda/device.h"

namespace flashattn::cuda {

// `chunked`: rows of the mask consist of whole, aligned 16-byte chunks. `to` has its memory.
void summarise_mask(const OpScope& scope, const MaskTensor& mask, bool chunked,
                    const MaskSummary& to);

}  // namespace flashattn::cuda
