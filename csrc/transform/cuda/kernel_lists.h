// The kernels that there are, by family: WEIGHTLIFT_..._KERNELS(F) is F(type) for each of them.
#pragma once

// Commas of template arguments would end an argument of F.
#define WEIGHTLIFT_KERNEL(...) __VA_ARGS__

#define WEIGHTLIFT_COPY_KERNELS(F) \
  F(CopyKernel<false>)             \
  F(CopyKernel<true>)

#define WEIGHTLIFT_MAP_KERNELS(F) \
  F(MapKernel<GivenTable>)        \
  F(MapKernel<RequantizeRule>)

#define WEIGHTLIFT_MARLIN_LAYOUTS(F, bits, a8)                             \
  F(WEIGHTLIFT_KERNEL(MarlinKernel<bits, a8, PackedLayout::kGptq, false>)) \
  F(WEIGHTLIFT_KERNEL(MarlinKernel<bits, a8, PackedLayout::kGptq, true>))  \
  F(WEIGHTLIFT_KERNEL(MarlinKernel<bits, a8, PackedLayout::kAwq, false>))  \
  F(WEIGHTLIFT_KERNEL(MarlinKernel<bits, a8, PackedLayout::kNMajor, false>))
#define WEIGHTLIFT_MARLIN_KERNELS(F)     \
  WEIGHTLIFT_MARLIN_LAYOUTS(F, 4, false) \
  WEIGHTLIFT_MARLIN_LAYOUTS(F, 4, true)  \
  WEIGHTLIFT_MARLIN_LAYOUTS(F, 8, false) \
  WEIGHTLIFT_MARLIN_LAYOUTS(F, 8, true)

#define WEIGHTLIFT_QUANTIZE_TYPES(F, source)                                  \
  F(WEIGHTLIFT_KERNEL(QuantizeFoundKernel<source, QuantizedType::kE4M3FN>))   \
  F(WEIGHTLIFT_KERNEL(QuantizeFoundKernel<source, QuantizedType::kE4M3FNUZ>)) \
  F(WEIGHTLIFT_KERNEL(QuantizeFoundKernel<source, QuantizedType::kInt8>))     \
  F(WEIGHTLIFT_KERNEL(QuantizeWithKernel<source, QuantizedType::kE4M3FN>))    \
  F(WEIGHTLIFT_KERNEL(QuantizeWithKernel<source, QuantizedType::kE4M3FNUZ>))  \
  F(WEIGHTLIFT_KERNEL(QuantizeWithKernel<source, QuantizedType::kInt8>))      \
  F(WEIGHTLIFT_KERNEL(AmaxKernel<source>))
#define WEIGHTLIFT_QUANTIZE_KERNELS(F)                 \
  WEIGHTLIFT_QUANTIZE_TYPES(F, ElementType::kFloat32)  \
  WEIGHTLIFT_QUANTIZE_TYPES(F, ElementType::kFloat16)  \
  WEIGHTLIFT_QUANTIZE_TYPES(F, ElementType::kBFloat16) \
  F(ScalesKernel)

// launch() for one of them, where its definition is included.
#define WEIGHTLIFT_INSTANTIATE_LAUNCH(...) template int launch(const __VA_ARGS__&, DeviceStream);
