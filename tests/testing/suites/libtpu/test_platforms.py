def test_platforms(platforms):
    print(platforms, "is the platform")
