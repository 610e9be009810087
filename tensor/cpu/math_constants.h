// Constants of the functions in math-inl.h and normal-inl.h, for f32 and f64. The polynomials
// interpolate at Chebyshev points; each comment gives the function and the range.
#pragma once

namespace lockstep {

template <class T>
struct MathConstants;

template <>
struct MathConstants<float> {
  static constexpr float kSplit = 0x1p12f + 1;
  static constexpr float kShift = 0x1.8p23f;
  // exp is infinite above and, also times what it is multiplied with here, 0 below.
  static constexpr float kExpLeast = -120, kExpMost = 89;
  // ln 2 in two parts; a product of the first with an exponent is exact.
  static constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  // (e^r - 1 - r) / r^2, |r| <= ln(2) / 2
  static constexpr float kExp[] = {0.5f,           0.166666672f,   0.041666463f,
                                   0.00833331048f, 0.00139337312f, 0.000198910799f};
  static constexpr float kTanhSmall = 0x1p-10f;
  // erf(x) / x - 1 in x^2, |x| <= kErfSmall
  static constexpr float kErfSmall = 0.9375f;
  static constexpr float kErf[] = {0.128379166f,   -0.376126319f,    0.11283683f,    -0.0268586893f,
                                   0.00519923493f, -0.000812203856f, 8.28202174e-05f};
  // (t + a) exp(t^2 / 2) (1 - Phi(t)) in (t - c) / (t + a), 0 <= t <= kTailLimit. Of the numbers near
  // the middle c is one for which the first coefficient is a float almost exactly.
  static constexpr float kTailA = 2, kTailC = 3.171875f;
  static constexpr float kTail[] = {0.599216521f,     -0.24193567f,     0.0315629728f,
                                    0.0150294472f,    -0.00325877848f,  -0.00219640159f,
                                    0.000125663195f,  0.00038414108f,   8.14533778e-05f,
                                    -3.87949185e-05f, -2.40195968e-05f, -3.89841807e-06f};
  // 1 - Phi(t) and t times it are 0 from here on.
  static constexpr float kTailLimit = 15;
};

template <>
struct MathConstants<double> {
  static constexpr double kSplit = 0x1p27 + 1;
  static constexpr double kShift = 0x1.8p52;
  static constexpr double kExpLeast = -770, kExpMost = 710;
  static constexpr double kLn2High = 0x1.62e42fefa38p-1, kLn2Low = 0x1.ef35793c7673p-45;
  static constexpr double kExp[] = {0.5,
                                    0.16666666666666671,
                                    0.041666666666666671,
                                    0.0083333333333260838,
                                    0.0013888888888883711,
                                    0.00019841269875002279,
                                    2.4801587325677461e-05,
                                    2.7557255170000888e-06,
                                    2.7557273478718582e-07,
                                    2.5105312729622103e-08,
                                    2.0914755325893202e-09};
  static constexpr double kTanhSmall = 0x1p-20;
  static constexpr double kErfSmall = 1;
  static constexpr double kErf[] = {
      0.12837916709551259,     -0.37612638903183748,    0.11283791670954876,
      -0.026866170645076268,   0.0052239776248126377,   -0.0008548326980509413,
      0.00012055331099279798,  -1.4925594957596026e-05, 1.6460995338195411e-06,
      -1.6350256278696497e-07, 1.4659383821340068e-08,  -1.1371291831047954e-09,
      5.9544715831534823e-11};
  static constexpr double kTailA = 2.5, kTailC = 3.078125;
  static constexpr double kTail[] = {
      0.66313429817204694,     -0.36401966636416005,    0.10749482562579346,
      0.0016774691983270818,   -0.010842971411315809,   5.8180058737595017e-05,
      0.0015387823327888683,   0.0001807762115567704,   -0.00023584144120692449,
      -9.0096497283903264e-05, 2.1953021137108317e-05,  2.6480198522553479e-05,
      4.8067100369896026e-06,  -4.2821749963222611e-06, -3.0495699807221142e-06,
      -3.4371030093612279e-07, 6.2840603279489972e-07,  4.2426836700300313e-07,
      5.82515228128308e-08,    -9.0926485000088927e-08, -7.1326607984669916e-08,
      -1.3002700466279376e-08, 1.456491633348371e-08,   1.0935546489368273e-08,
      1.3899436450649294e-09,  -1.5991727911153674e-09, -8.0110619289028892e-10,
      -1.1914419562071523e-10};
  static constexpr double kTailLimit = 39;
};

}  // namespace lockstep
