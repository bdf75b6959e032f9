// Hidden rows that steps push and later steps pull: the first slots in memory of the device, the others in host memory that
// threads read and write over the bus. A group of 32 lanes has a row.

// Numbers as f32, and back.
struct SingleRows : Single {
    static __device__ __forceinline__ u32 bits(float value) { return __float_as_uint(value); }
};

struct HalfRows : Half {
    // To the nearest, of two equally near ones to the even one, at most to the largest finite one; NaN stays NaN.
    static __device__ __forceinline__ u16 bits(float value) {
        float most = 65504.0f;
        value = value > most ? most : value < -most ? -most : value;
        u16 rounded;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
        return rounded;
    }
};

template <class B>
__device__ __forceinline__ B* row_of(B* device, B* host, u32 slot, u32 device_slots, u32 columns) {
    return slot < device_slots ? device + (u64)slot * columns : host + (u64)(slot - device_slots) * columns;
}

// `to[i]` = the row of `slots[i]`.
template <class S>
__device__ __forceinline__ void pull(
    const typename S::Bits* device, const typename S::Bits* host, const u32* slots, float* to, u32 count, u32 columns,
    u32 device_slots
) {
    u32 lane = threadIdx.x % 32, row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= count) return;
    const typename S::Bits* from = row_of(device, host, slots[row], device_slots, columns);
    for (u32 column = lane; column < columns; column += 32) to[(u64)row * columns + column] = S::value(from[column]);
}

// The row of `slots[i]` = `from[i]`. `drifts[1 + i]` = how far it moved, if it replaces a row; `drifts[0]` = the sum so far.
template <class S>
__device__ __forceinline__ void push(
    const float* from, const u32* slots, const u32* replaces, typename S::Bits* device, typename S::Bits* host,
    const double* drift, double* drifts, u32 count, u32 columns, u32 device_slots
) {
    u32 lane = threadIdx.x % 32, row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= count) return;
    typename S::Bits* to = row_of(device, host, slots[row], device_slots, columns);
    bool moves = replaces[row] != 0;
    double moved = 0.0, before = 0.0;
    for (u32 column = lane; column < columns; column += 32) {
        typename S::Bits bits = S::bits(from[(u64)row * columns + column]);
        if (moves) {
            double old = S::value(to[column]), difference = (double)S::value(bits) - old;
            moved += difference * difference;
            before += old * old;
        }
        to[column] = bits;
    }
    for (int distance = 16; distance > 0; distance /= 2) {
        moved += __shfl_xor_sync(FULL, moved, distance);
        before += __shfl_xor_sync(FULL, before, distance);
    }
    if (lane > 0) return;
    drifts[1 + row] = moved == 0.0 ? 0.0 : before == 0.0 ? 1.0 : sqrt(moved / before);
    if (row == 0) drifts[0] = *drift;
}

extern "C" __global__ void __launch_bounds__(256) pull_single(
    const SingleRows::Bits* device, const SingleRows::Bits* host, const u32* slots, float* to, u32 count, u32 columns, u32 device_slots
) {
    pull<SingleRows>(device, host, slots, to, count, columns, device_slots);
}

extern "C" __global__ void __launch_bounds__(256) push_single(
    const float* from, const u32* slots, const u32* replaces, SingleRows::Bits* device, SingleRows::Bits* host, const double* drift,
    double* drifts, u32 count, u32 columns, u32 device_slots
) {
    push<SingleRows>(from, slots, replaces, device, host, drift, drifts, count, columns, device_slots);
}

extern "C" __global__ void __launch_bounds__(256) pull_half(
    const HalfRows::Bits* device, const HalfRows::Bits* host, const u32* slots, float* to, u32 count, u32 columns, u32 device_slots
) {
    pull<HalfRows>(device, host, slots, to, count, columns, device_slots);
}

extern "C" __global__ void __launch_bounds__(256) push_half(
    const float* from, const u32* slots, const u32* replaces, HalfRows::Bits* device, HalfRows::Bits* host, const double* drift,
    double* drifts, u32 count, u32 columns, u32 device_slots
) {
    push<HalfRows>(from, slots, replaces, device, host, drift, drifts, count, columns, device_slots);
}
